"""All flows by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.acceptance.turns import agents, chats, lives
from tests.acceptance.turns.flow import Flow

ANY_LOSS = 1 << 30  # how much depends on how busy the machine is
INTERVALS = 2 * 2048  # the last of the states of a long prefill, and one on its way

FLOWS: Mapping[str, Flow] = {
    flow.name: flow
    for flow in (
        Flow(chats.chat),
        Flow(chats.chat_without_thinking),
        Flow(chats.thinking),
        Flow(chats.thinking_in_a_field),
        Flow(chats.thinking_as_text),
        Flow(agents.agent),
        Flow(agents.agent_without_reasoning),
        Flow(agents.helpers),
        Flow(agents.helpers_together, parallel=2),
        Flow(chats.edits),
        Flow(chats.compaction),
        Flow(lives.cancelled, is_counted=False, has_template=False),
        Flow(
            lives.killed,
            max_short_tokens=INTERVALS,
            is_counted=False,
            has_template=False,
            needs_directory=True,
        ),
        Flow(lives.together, parallel=4),
        Flow(lives.choices, parallel=4),
        Flow(lives.warmed, is_counted=False, has_template=False),
        Flow(lives.warmed_directory, is_counted=False, has_template=False, needs_directory=True),
        Flow(lives.ended, needs_directory=True),
        Flow(
            lives.killed_at_once,
            max_short_tokens=ANY_LOSS,
            is_counted=False,
            has_template=False,
            needs_directory=True,
        ),
    )
}

"""What a choice did on one lane, or on several one after the other: for its last delta to tell.

Values only. Knows no lane and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from luceasync.request import Restore, Speculation


@dataclass(frozen=True, slots=True)
class LaneWork:
    """`num_run` tokens were prefilled in `prefill_s` seconds; `num_cached` of the prompt were
    restored, and `restore` says how, on the first lane. `speculation` None: there is no draft.
    """

    num_cached: int
    num_run: int
    prefill_s: float
    restore: Restore
    speculation: Speculation | None

    def after(self, before: LaneWork | None) -> LaneWork:
        """Both together."""
        if before is None:
            return self
        return LaneWork(
            before.num_cached,
            before.num_run + self.num_run,
            before.prefill_s + self.prefill_s,
            before.restore,
            _together(before.speculation, self.speculation),
        )


def _together(one: Speculation | None, other: Speculation | None) -> Speculation | None:
    if one is None or other is None:
        return one or other
    return Speculation(
        one.rounds + other.rounds,
        one.proposed + other.proposed,
        one.accepted + other.accepted,
        other.off_reason,
    )

"""What a tensor's name says of its part, and where that part lies in the file."""

import pytest

from luceasync.disk_cache.codec import NodePart, TensorEntry, file_order, part_of
from tests.disk_cache.node_files import END_KINDS

NAMES = {
    "tokens": "span",
    "ls0_attn_k.3": "span",
    "ls12_attn_v.63": "span",
    "ls0_conv.x": "span",
    "ls0_conv.0": "state",
    "ls1_delta.62": "state",
    "snap_prefill_logits": "logits",
    "kvflash_ledger": "ledger",
    "dflash_feature_meta": "features",
    "dflash_feature_data": "features",
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_the_name_of_a_tensor_tells_its_part(name: str, part: str) -> None:
    assert part_of(name, END_KINDS) is NodePart(part)


def test_tokens_come_first_and_the_end_last() -> None:
    sizes = {"ls0_delta.0": 64, "ls0_attn_k.1": 2, "snap_prefill_logits": 128, "tokens": 1, "x": 64}
    entries = [TensorEntry(name, "U8", (size,), "") for name, size in sizes.items()]
    names = [entry.name for entry in file_order(entries, END_KINDS)]
    assert names == ["tokens", "x", "ls0_attn_k.1", "ls0_delta.0", "snap_prefill_logits"]

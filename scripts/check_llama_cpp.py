"""Greedy answers of a GGUF file beside llama.cpp's, and logits of the same numbers in float32.

    python -m scripts.check_llama_cpp FILE.gguf --peer PYTHON [--tokens 64]

`PYTHON` has llama-cpp-python. Ten questions are answered in float32; where answers part, both
tokens' logits are shown: a near tie is one that rounding decides. llama.cpp rounds activations of
quantised products to 8 bits, so the file is compared in float32 too, its numbers written out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch

from luceasync.bench import command
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from scripts.quantised.backends import open_file
from scripts.quantised.processes import FP32, Peer

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Name three colours.",
    "What is 12 plus 30?",
    "Why is the sky blue?",
    "Tell me a short joke.",
    "What does a baker make?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
)
CONTEXT = 512


def main() -> None:
    """Compare and print."""
    parser = command.parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    report = command.begin(options)
    template, tokenizer = ChatTemplate.load(options.file), Tokenizer.load(options.file)
    prompts = [
        tokenizer.encode(template.render([{"role": "user", "content": question}]))
        for question in QUESTIONS
    ]
    with tempfile.TemporaryDirectory() as folder:
        plain = write_plain(options.file, Path(folder) / "plain.gguf")
        for title, path in ((options.file.name, options.file), ("the same in F32", plain)):
            columns = ("question", "equal tokens", "largest difference", "where they part")
            table = report.table(columns, f"{title}, {options.tokens} tokens")
            peer = Peer(options.peer, path, CONTEXT, FP32)
            backend = open_file(path, CONTEXT, "fp32")
            for question, ids in zip(QUESTIONS, prompts, strict=True):
                theirs = peer.answer(ids, options.tokens)
                table.add(question, *compared(backend, ids, theirs, tokenizer))
            peer.close()
            backend.close()


def compared(
    backend: LayerSplitBackend, ids: list[int], theirs: list[np.ndarray], tokenizer: Tokenizer
) -> tuple[str, str, str]:
    """How many tokens are equal, the largest difference of a logit until then, where they part."""
    backend.reset(0)
    logits = backend.prefill(0, 0, ids, project=True)
    largest = 0.0
    for number, peer in enumerate(theirs):
        assert logits is not None
        own = logits.flatten().float().numpy()
        largest = max(largest, float(np.abs(own - peer).max()))
        token, other = int(own.argmax()), int(peer.argmax())
        if token != other:
            words = [
                f"{tokenizer.token_text(i)!r} {own[i]:.3f}, there {peer[i]:.3f}"
                for i in (token, other)
            ]
            return str(number), f"{largest:.5f}", "; ".join(words)
        logits = backend.decode([0], [len(ids) + number], [token]).whole()
    return str(len(theirs)), f"{largest:.5f}", ""


def write_plain(path: Path, to: Path) -> Path:
    """The file's numbers in float32: all else of it stays."""
    reader = gguf.GGUFReader(path)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture",):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, numbers.reshape(tuple(reversed(tensor.shape.tolist()))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

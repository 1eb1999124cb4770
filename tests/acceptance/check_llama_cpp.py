"""A GGUF file beside llama.cpp, and files that llama.cpp makes of it: logits, tokens, token ids.

    python -m tests.acceptance.check_llama_cpp FILE.gguf --peer PYTHON [--types Q8_0] [--texts 2000]

`PYTHON` has llama-cpp-python, which rounds activations of quantised products to 8 bits; on the same
numbers in float32 everything must be equal. Both models are given the tokens that llama.cpp finds
likeliest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from luceasync.bench.report import Report
from luceasync.errors import ModelError
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance import command
from tests.acceptance.quantised.backends import open_file
from tests.acceptance.quantised.files import write_plain
from tests.acceptance.quantised.processes import FP32, Peer, requantise
from tests.acceptance.quantised.texts import nfc_texts

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


@dataclass(frozen=True)
class Answer:
    """The comparison of one answer. `parted`: where another token was likeliest, in words;
    `widest`: by how much it was less likely here, at most.
    """

    num_tokens: int
    num_alike: int
    largest: float
    widest: float
    parted: tuple[str, ...]


def main() -> None:
    """Compare and print."""
    parser = command.parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--types", type=command.names, default=[], help="that the file is made of")
    parser.add_argument("--texts", type=int, default=0, help="whose token ids are compared")
    parser.add_argument(
        "--plain", action="store_true", help="only the file's numbers in F32, not the file itself"
    )
    options = parser.parse_args()
    report = command.open_report(options)
    tokenizer = Tokenizer.load(options.file)
    if options.texts:
        compare_ids(report, options.peer, options.file, tokenizer, options.texts)
    prompts = prompts_of(options.file, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        plain = write_plain(options.file, Path(folder) / "plain.gguf")
        files = {} if options.plain else {options.file.name: options.file}
        files["the same in F32"] = plain
        for kind in options.types:
            path = requantise(options.peer, plain, Path(folder) / f"{kind}.gguf", kind)
            written = write_plain(path, Path(folder) / f"{kind}.plain.gguf")
            files |= {f"made of it in {kind}": path, f"{kind} in F32": written}
        summary = []
        for title, path in files.items():
            answers = compare(options.peer, path, tokenizer, prompts, options.tokens)
            table = report.table(("question", "alike", "largest difference", "parted"), title)
            for number, answer in enumerate(answers):
                alike = f"{answer.num_alike} of {answer.num_tokens}"
                words = "; ".join(answer.parted)
                table.add(str(number + 1), alike, f"{answer.largest:.5f}", words)
            summary.append((title, answers))
        columns = ("file", "likeliest token alike", "largest difference", "widest gap where not")
        table = report.table(columns, "All")
        for title, answers in summary:
            alike = sum(answer.num_alike for answer in answers)
            num_tokens = sum(answer.num_tokens for answer in answers)
            largest = max(answer.largest for answer in answers)
            shown = f"{alike} of {num_tokens}, {alike / num_tokens:.1%}"
            widest = max(answer.widest for answer in answers)
            table.add(title, shown, f"{largest:.5f}", f"{widest:.3f}")


def prompts_of(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """The questions in the file's chat template or, without one, as texts of the model begin."""
    try:
        template = ChatTemplate.load(path)
    except ModelError:
        return [tokenizer.encode(tokenizer.lead + question) for question in QUESTIONS]
    messages = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [tokenizer.encode(template.render(each)) for each in messages]


def compare(
    python: str, path: Path, tokenizer: Tokenizer, prompts: Sequence[list[int]], num_tokens: int
) -> list[Answer]:
    """Compare the answers to every prompt, with keys, values and activations in float32."""
    peer, backend = Peer(python, path, CONTEXT, FP32), open_file(path, CONTEXT, "fp32")
    answers = [compared(backend, ids, peer.answer(ids, num_tokens), tokenizer) for ids in prompts]
    peer.close()
    backend.close()
    return answers


def compared(
    backend: LayerSplitBackend, ids: list[int], theirs: list[np.ndarray], tokenizer: Tokenizer
) -> Answer:
    """Compare with `theirs`, logits before each token."""
    backend.reset(0)
    logits = backend.prefill(0, 0, ids, project=True)
    num_alike, largest, widest, parted = 0, 0.0, 0.0, []
    for number, peer in enumerate(theirs):
        assert logits is not None
        own = logits.flatten().float().numpy()
        largest = max(largest, float(np.abs(own - peer).max()))
        token, other = int(own.argmax()), int(peer.argmax())
        num_alike += token == other
        if token != other:
            widest = max(widest, float(own[token] - own[other]))
            words = [
                f"{tokenizer.token_text(i)!r} {own[i]:.3f}, there {peer[i]:.3f}"
                for i in (token, other)
            ]
            parted.append(f"{number}: {'; '.join(words)}")
        logits = backend.decode([0], [len(ids) + number], [other]).whole()
    return Answer(len(theirs), num_alike, largest, widest, tuple(parted))


def compare_ids(
    report: Report, python: str, path: Path, tokenizer: Tokenizer, num_texts: int
) -> None:
    """Compare ids of texts in which special tokens are ordinary text."""
    texts = nfc_texts(num_texts)
    peer = Peer(python, path, CONTEXT, FP32)
    theirs = peer.tokens(texts)
    peer.close()
    own = [tokenizer.encode(text, special=False) for text in texts]
    unlike = [i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1]]
    table = report.table(("texts", "ids", "texts whose ids differ"), "Token ids")
    table.add(str(len(texts)), str(sum(map(len, own))), str(len(unlike)))
    for i in unlike[:5]:
        report.say(f"{texts[i]!r}: {own[i]}, there {theirs[i]}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

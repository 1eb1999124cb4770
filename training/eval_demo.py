"""Send the bundled model its evaluation questions and count the answers that begin exactly right.

Greedy. Exact means the first 32 tokens, and for a shorter answer also that it ends there. The
questions come from the model's directory.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from training.demo.evaluation import NUM_EXACT_TOKENS, Entry, expected_ids, read_entries

MODEL_DIR = Path(__file__).parents[1] / "luceasync" / "assets" / "stdlib-15m"
BATCH_SIZE = 25
REQUEST_TIMEOUT_S = 120.0


def main() -> None:
    args = _arguments()
    entries = read_entries(args.questions or args.model / "eval.jsonl")[: args.limit]
    if args.url:
        verdicts = ask_server(args.url.rstrip("/"), args.model, entries, args.parallel)
    else:
        verdicts = ask_transformers(args.model, entries, args.dtype, args.device)
    report(entries, verdicts)


def ask_transformers(
    model_dir: Path, entries: list[Entry], dtype: str, device: str
) -> list[tuple[bool, str]]:
    """For each entry: whether it is exact, and the text; left-padded batches through `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtypes[dtype]).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    verdicts = []
    for begin in range(0, len(entries), BATCH_SIZE):
        batch = entries[begin : begin + BATCH_SIZE]
        prompts = [
            tokenizer.apply_chat_template(e["messages"], tokenize=False, add_generation_prompt=True)
            for e in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            device
        )
        generated = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=NUM_EXACT_TOKENS,
            do_sample=False,
        )
        answers = generated[:, inputs["input_ids"].shape[1] :].tolist()
        for entry, ids in zip(batch, answers, strict=True):
            expected = expected_ids(tokenizer.backend_tokenizer, entry["answer"])
            verdicts.append((ids[: len(expected)] == expected, tokenizer.decode(ids)))
    return verdicts


def ask_server(
    url: str, model_dir: Path, entries: list[Entry], parallel: int
) -> list[tuple[bool, str]]:
    """The same over /v1/chat/completions; texts are compared, since the responses
    contain no ids.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    with urllib.request.urlopen(f"{url}/v1/models", timeout=REQUEST_TIMEOUT_S) as response:
        model = json.load(response)["data"][0]["id"]

    def ask(entry: Entry) -> tuple[bool, str]:
        choice = _complete(url, model, entry)
        text = choice["message"]["content"] or ""
        return is_exact(tokenizer, entry["answer"], text, choice["finish_reason"]), text

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(ask, entries))


def is_exact(tokenizer: Tokenizer, answer: str, text: str, finish_reason: str) -> bool:
    """Whether `text`, cut off at NUM_EXACT_TOKENS tokens, equals the beginning of `answer`."""
    expected = expected_ids(tokenizer, answer)
    if expected[-1] == tokenizer.token_to_id("<|im_end|>"):
        return text == answer and finish_reason == "stop"
    # A character cut in two at the end may be held back, or shown as the replacement character.
    wanted = tokenizer.decode(expected, skip_special_tokens=False).rstrip("\ufffd")
    return text.rstrip("\ufffd") == wanted and finish_reason == "length"


def _complete(url: str, model: str, entry: Entry) -> dict:
    body = {
        "model": model,
        "messages": entry["messages"],
        "temperature": 0,
        "max_tokens": NUM_EXACT_TOKENS,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)["choices"][0]


def report(
    entries: list[Entry], verdicts: list[tuple[bool, str]], show: Callable[[str], None] = print
) -> None:
    """One line per template or kind, the wrong answers, and the share of right ones."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for entry, (exact, text) in zip(entries, verdicts, strict=True):
        groups[entry.get("template") or entry["kind"]].append(exact)
        if not exact:
            question = entry["messages"][-1]["content"]
            show(f"miss: {question!r}")
            show(f"  got      {text[:100]!r}")
            show(f"  expected {entry['answer'][:100]!r}")
    for name, exacts in groups.items():
        show(f"{sum(exacts):4d} of {len(exacts):3d}  {name}")
    num_exact = sum(exact for exact, _ in verdicts)
    show(f"{num_exact} of {len(verdicts)} exact: {num_exact / len(verdicts):.1%}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument(
        "--transformers", action="store_true", help="ask the model through transformers"
    )
    who.add_argument("--url", help="ask a running server")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="the model's directory")
    parser.add_argument(
        "--questions", type=Path, help="question file (default: eval.jsonl of the model)"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="with --transformers"
    )
    parser.add_argument("--device", default="cpu", help="with --transformers")
    parser.add_argument("--parallel", type=int, default=4, help="requests at a time, with --url")
    parser.add_argument("--limit", type=int, help="ask only the first questions")
    return parser.parse_args()


if __name__ == "__main__":
    main()

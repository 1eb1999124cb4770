"""lm_eval, the command: loglikelihood and generation, with the server's tokenizer and by chat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import MODEL, URL, tell

LM_EVAL = Path(sys.executable).parent / "lm_eval"
FOLDER = Path.cwd() / "lm_eval"
SCORED = """task: scored
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no", "a longer answer"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
GENERATED = """task: generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "yes"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
REMOTE = "tokenizer_backend=remote"


def lm_eval(model: str, task: str, where: str, *options: str) -> dict:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / "questions.json"
    path.write_text(
        "\n".join(json.dumps({"question": f"Is {i} a number? "}) for i in range(3)) + "\n"
    )
    (FOLDER / "scored.yaml").write_text(SCORED.format(path=path))
    (FOLDER / "generated.yaml").write_text(GENERATED.format(path=path))
    out = FOLDER / f"{model}-{task}"
    args = ",".join((f"model={MODEL}", f"base_url={URL}{where}", "num_concurrent=1", *options))
    ran = subprocess.run(
        [
            *(str(LM_EVAL), "--model", model, "--tasks", task, "--include_path", str(FOLDER)),
            *("--model_args", args, "--output_path", str(out)),
            *(["--apply_chat_template"] if "chat" in model else []),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(FOLDER), "OPENAI_API_KEY": "k"},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-600:]
    [found] = sorted(out.rglob("results_*.json"))[-1:]
    return json.loads(found.read_text())["results"][task]


def loglikelihood():
    assert 0 <= lm_eval("local-completions", "scored", "/v1/completions", REMOTE)["acc,none"] <= 1


def generation():
    lm_eval("local-completions", "generated", "/v1/completions", REMOTE)


def chat_generation():
    lm_eval("local-chat-completions", "generated", "/v1/chat/completions")


tell(loglikelihood, generation, chat_generation)

"""Examples at the end of each --help."""

from __future__ import annotations

EXAMPLES = {
    "": ["specbatch generate data.jsonl"],
    "generate": [
        "specbatch generate data.jsonl",
        "specbatch generate data.jsonl --model org/name --max-tokens 512 -o answers.jsonl",
    ],
    "eval": ["specbatch eval gsm8k --limit 100", "specbatch eval gsm8k --method ngram --compare none"],
    "tune": ["specbatch tune data.jsonl -o tuned.yaml", "specbatch generate data.jsonl -c tuned.yaml"],
    "config": ["specbatch config --set speculation.topk=4"],
    "init": ["specbatch init"],
    "models": ["specbatch models list"],
    "models list": ["specbatch models list"],
    "models pull": ["specbatch models pull smollm2-135m-instruct"],
    "models path": ["specbatch models path smollm2-135m-instruct"],
}

# For users who have no file yet. It works without changes.
FIRST_RUN = (
    """for example: echo '{"prompt": "What is the capital of France?"}' > data.jsonl && specbatch generate data.jsonl"""
)


def examples(command: str) -> str:
    """The `epilog` of a command, "" for specbatch itself: its examples, one a line."""
    title = "Examples" if len(EXAMPLES[command]) > 1 else "Example"
    return "\n".join([f"{title}:", *(f"  {line}" for line in EXAMPLES[command])])

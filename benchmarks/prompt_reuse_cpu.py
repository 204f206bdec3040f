"""Time to the first token of a conversation, and of users who share a system prompt, without and with a prompt store.

It reads a text and questions about it from ../shared/data, which a clone does not have: it runs when it is named.
"""

import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks import harness
from benchmarks.harness import footnote, in_ms, largest_error, markdown, verify_model
from benchmarks.model_cpu import interdomain
from modeling_interdomain import InterdomainCache, StateStore

TURNS, ANSWER, USERS, SYSTEM_TOKENS, REPETITIONS = 20, 16, 8, 1024, 3
SHOWN = (1, 2, 5, 10, 20)
REQUIRED = {"turn": 8.0, "user": 5.0}  # of the last turn, and of users from the third on
DATA = Path("../shared/data")


def run(quick: bool = False) -> dict:
    model = interdomain(quick)
    config = model.config
    model.generation_config.eos_token_id = None
    record = {"relative_error": verify_model(model)}
    turns, users = (4, 3) if quick else (TURNS, USERS)
    system, questions = _random_text(config.vocab_size, turns) if quick else _text(turns)
    with torch.no_grad():
        repetitions = 1 if quick else REPETITIONS
        record["conversation"] = _merged([_conversation(model, system, questions) for _ in range(repetitions)])
        record["users"] = _merged([_users(model, system, questions[:users]) for _ in range(repetitions)])
    cache = InterdomainCache(config)
    model(system[:, :8], past_key_values=cache)
    return record | {"state_bytes": cache.state_bytes(), "answer": ANSWER}


def _text(turns: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An article of XQuAD, from its beginning, and questions that people asked about it."""
    if not DATA.is_dir():
        raise SystemExit(f"{DATA} is not a folder: this table needs the text and the questions in it.")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers" / "mistral-v1-32k")
    from datasets import load_dataset  # the page of this table is written without it

    rows = load_dataset("parquet", data_files=str(DATA / "recall" / "xquad_en_1190.parquet"), split="train")
    title = rows[0]["title"]
    rows = [row for row in rows if row["title"] == title]
    article = "\n\n".join(dict.fromkeys(row["context"] for row in rows))

    def encode(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    system = encode(f"{tokenizer.bos_token}Answer from this article.\n\n{article}")[:, :SYSTEM_TOKENS]
    return system, [encode(f"\n\nUser: {row['question']}\nAssistant:") for row in rows[:turns]]


def _random_text(vocabulary: int, turns: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    system, *questions = (
        torch.randint(vocabulary, (1, length), generator=generator) for length in (130, *range(5, 5 + turns))
    )
    return system, questions


class _FirstToken:
    """A streamer that notes when the first token comes, the prompt not counted."""

    def __init__(self):
        self.puts, self.time = 0, 0.0

    def put(self, tokens) -> None:
        self.puts += 1
        if self.puts == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        pass


def _answer(model, store: StateStore | None, ids: torch.Tensor) -> dict:
    """The whole text with its answer, seconds to the first token, the tokens that were read, and the first logits."""
    model.prompt_store = store
    before, first = 0 if store is None else store.tokens_read, _FirstToken()
    started = time.perf_counter()
    found = model.generate(
        ids, max_new_tokens=ANSWER, do_sample=False, streamer=first, output_logits=True, return_dict_in_generate=True
    )
    read = ids.shape[1] if store is None else store.tokens_read - before
    return {"text": found.sequences, "seconds": first.time - started, "read": read, "logits": found.logits[0]}


def _both(model, store: StateStore, ids: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """One prompt without and with the store; refuses where the two differ by more than rounding."""
    plain, stored = _answer(model, None, ids), _answer(model, store, ids)
    error = largest_error([stored["logits"]], [plain["logits"]], "The prompt store changes the logits", bound=1e-3)
    row = {"prompt": ids.shape[1], "read": stored["read"], "error": error}
    return row | {"without": plain["seconds"], "with": stored["seconds"]}, stored["text"]


def _conversation(model, system: torch.Tensor, questions: list[torch.Tensor]) -> list[dict]:
    text, store, rows = system[:, :64], StateStore(), []
    for question in questions:
        row, text = _both(model, store, torch.cat([text, question], dim=1))
        rows.append(row)
    return rows


def _users(model, system: torch.Tensor, questions: list[torch.Tensor]) -> list[dict]:
    store = StateStore()
    return [_both(model, store, torch.cat([system, question], dim=1))[0] for question in questions]


def _merged(repetitions: list[list[dict]]) -> list[dict]:
    """One row a prompt, its times summed up over the repetitions."""
    rows = []
    for same in zip(*repetitions, strict=True):
        times = {name: harness.summary([row[name] for row in same]) for name in ("without", "with")}
        ratio = times["without"]["median"] / times["with"]["median"]
        rows.append({**same[0], "error": max(row["error"] for row in same), **times, "ratio": ratio})
    return rows


def table(record: dict) -> str:
    turns, users = record["conversation"], record["users"]
    rows = [_cells(f"turn {n} of a conversation", turns[n - 1]) for n in SHOWN if n <= len(turns)]
    rows += [_cells(f"user {n} of a shared system prompt", users[n - 1]) for n in (1, 2, 3, len(users))]
    error = max(row["error"] for row in (*turns, *users))
    about = (
        f"The 125M shape, batch 1, float32, answers of {record['answer']} tokens, states of {record['state_bytes']:,} "
        f"bytes in memory; medians of {turns[0]['with']['samples']} (20th to 80th percentile). The logits of the first "
        f"tokens differ by at most {error:.0e} of their size. Required: {REQUIRED['turn']:g}x at the last turn, "
        f"{REQUIRED['user']:g}x from the third user on."
    )
    header = ["", "tokens of the prompt", "read with a store", "first token without, ms", "with, ms", "faster"]
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def _cells(name: str, row: dict) -> list[str]:
    numbers = [f"{row['prompt']:,}", f"{row['read']:,}", in_ms(row["without"], 0), in_ms(row["with"], 0)]
    return [name, *numbers, f"{row['ratio']:.2f}x"]

"""The evaluation harness, unchanged, runs these models: its tasks from local files, in batches, in other processes."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import datasets
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from pyarrow import parquet, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import evaluate_tasks, text_data
from tests.conftest import EXHAUSTIVE_PAIRS, PAIRS
from tests.test_examples import WORDS, some_documents

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"
MIXERS = ["interdomain", "interdomain-softmax", "s4d", "softmax", "cheems"]
SLOW = "hax"
COMMONSENSE = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada_openai"]
TASKS = ["commonsense", "lambada_standard", "wikitext", "recall", "triviaqa", "longdocs"]
METRICS = {
    "piqa": {"acc", "acc_norm"},
    "hellaswag": {"acc", "acc_norm"},
    "winogrande": {"acc"},
    "arc_easy": {"acc", "acc_norm"},
    "arc_challenge": {"acc", "acc_norm"},
    "social_iqa": {"acc"},
    "boolq": {"acc"},
    "commonsense": {"acc"},
    "lambada_openai": {"perplexity", "acc"},
    "lambada_standard": {"perplexity", "acc"},
    "wikitext": {"word_perplexity", "byte_perplexity", "bits_per_byte"},
    "longdocs": {"word_perplexity", "byte_perplexity", "bits_per_byte"},
    "squad": {"contains"},
    "xquad": {"contains"},
    "drop": {"contains"},
    "recall": {"contains"},
    "triviaqa": {"contains"},
}
ROWS = {
    "piqa": 1838,
    "hellaswag": 10042,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "social_iqa": 1954,
    "boolq": 3270,
    "lambada_openai": 5153,
    "lambada_standard": 5153,
    "wikitext": 62,
    "longdocs": 34,
    "squad": 1000,
    "xquad": 1190,
    "drop": 1000,
    "triviaqa": 3000,
}
# One of each kind of request: choices, the last word, whole documents in windows, generation.
KINDS = ["local_arc_easy", "local_lambada_openai", "local_wikitext", "local_squad"]


def words(start, count):
    return " ".join(WORDS[(start + i * i) % 8] for i in range(count))


def some_rows(number):
    """A row of every file; its lengths grow with the number, so that batches are padded."""
    size = 2 + 3 * number
    choices = {"text": [words(number + i, 1 + i + number) for i in range(4)], "label": list("ABCD")}
    arc = {"id": str(number), "question": words(number, size), "choices": choices, "answerKey": "ABCD"[number % 4]}
    lambada = {"text": words(number, size)}
    passage = {"question": words(number, 3), "answers": [words(number, 2), WORDS[number % 8]]}
    squad = {"id": str(number), "title": "t", "context": words(number, 2 * size)} | passage
    hellaswag = {"activity_label": "Label", "ctx_a": words(number, size), "ctx_b": "then he", "label": str(number % 4)}
    return {
        "eval/piqa/validation": {"goal": words(number, size), "sol1": words(1, 3), "sol2": words(2, 5), "label": 1},
        "eval/hellaswag/validation": hellaswag | {"endings": [words(i, 2 + i) for i in range(4)]},
        "eval/winogrande/validation": {
            "sentence": f"{words(number, size)} _ {words(2, 3)}.",
            "option1": WORDS[0],
            "option2": WORDS[1],
            "answer": "2",
        },
        "eval/arc_easy/test": arc,
        "eval/arc_easy/validation": arc,
        "eval/arc_challenge/test": arc,
        "eval/arc_challenge/validation": arc,
        "eval/social_iqa/validation": {"context": words(number, size), "question": "Who?", "label": "3"}
        | {f"answer{letter}": words(i, 2) for i, letter in enumerate("ABC")},
        "eval/boolq/validation": {"passage": words(number, size), "question": "so", "idx": number, "label": number % 2},
        "eval/lambada_openai/test": lambada,
        "eval/lambada_standard/test": lambada,
        "eval/lambada_standard/validation": lambada,
        "wikitext-2/test": {"page": f" = {words(number, 2)} = \n {words(number, 12 * size)} . \n"},
        "longdocs/test": {"id": str(number), "year": 1900, "text": words(number, 12 * size)},
        "recall/squad_v11_dev_1000": squad,
        "recall/xquad_en_1190": squad,
        "recall/drop_dev_1000": {"query_id": str(number), "passage": words(number, size)} | passage,
        "recall/triviaqa_closedbook_3000": {
            "question": words(number, 4),
            "answer": "alpha",
            "aliases": ["alpha", " A "],
        },
    }


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Rows that the datasets library converts are kept nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder laid out like the real one, seven rows a file: two processes get unequal shares."""
    folder = tmp_path_factory.mktemp("data")
    rows = [some_rows(number) for number in range(7)]
    for name in rows[0]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        columns = {key: [row[name][key] for row in rows] for key in rows[0][name]}
        parquet.write_table(table(columns), folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="module")
def manager(data):
    return task_manager(data)


def task_manager(data):
    return TaskManager(include_path=evaluate_tasks.TASKS, include_defaults=False, metadata={"data": str(data)})


@pytest.fixture(scope="module")
def folders(make_model, tmp_path_factory):
    """Random models of every mixer, saved with their code and a tokenizer."""
    parent = tmp_path_factory.mktemp("models")
    tokenizer = text_data.train_tokenizer(some_documents(), vocab_size=300)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    for name in (*MIXERS, SLOW, *PAIRS):
        model = make_model(name, dtype=torch.float32, vocab_size=300, max_position_embeddings=128, **ids)
        model.save_pretrained(parent / name)
        tokenizer.save_pretrained(parent / name)
    return parent


def evaluate(folder, manager, tasks=KINDS, limit=None, **options):
    """The harness's results with the samples, loaded through the classes that are registered here."""
    model = HFLM(str(folder), device="cpu", **options)
    return lm_eval.evaluate(model, manager.load(list(tasks)), limit=limit, bootstrap_iters=0)


def answers(samples):
    """What the model answered: log-likelihoods and texts, sample by sample, in the order of the requests."""
    numbers, texts = [], []
    for task in KINDS:
        for sample in sorted(samples[task], key=lambda sample: sample["doc_id"]):
            for response in sample["filtered_resps"]:
                if task == "local_squad":
                    texts.append(response)
                else:
                    numbers.append(float(response[0] if isinstance(response, (list, tuple)) else response))
    return numbers, texts


@pytest.fixture(scope="module")
def single(folders, manager):
    """`single(name)`: the answers of a mixer, one sequence at a time."""

    @functools.cache
    def of_one(name: str):
        return answers(evaluate(folders / name, manager, batch_size=1)["samples"])

    return of_one


# Tasks.


def test_every_task_has_its_metrics(folders, manager):
    results = evaluate(folders / "interdomain", manager, [f"local_{name}" for name in TASKS], batch_size=4)
    assert set(results["results"]) == {f"local_{name}" for name in METRICS}
    for name, metrics in METRICS.items():
        row = results["results"][f"local_{name}"]
        found = {
            key.split(",")[0]: value for key, value in row.items() if key.endswith(",none") and "_stderr" not in key
        }
        assert set(found) == metrics
        assert all(0 <= value < float("inf") for value in found.values())
    accuracies = [results["results"][f"local_{name}"]["acc,none"] for name in COMMONSENSE]
    assert results["results"]["local_commonsense"]["acc,none"] == pytest.approx(sum(accuracies) / 8)
    assert {counts["effective"] for counts in results["n-samples"].values()} == {7}


def test_answers_are_found_in_what_is_generated(manager):
    tasks = manager.load(["local_recall", "local_triviaqa"])["tasks"]
    for name in ("squad", "xquad", "drop"):
        task = tasks[f"local_{name}"]
        doc = task.eval_docs[0]
        assert task.doc_to_text(doc).endswith(f"\nQuestion: {doc['question']}\nAnswer:")
        for text, right in [(f"It is {doc['answers'][1].upper()}.", 1), ("It is unknown.", 0), ("", 0)]:
            assert task.process_results(doc, [text]) == {"contains": right}
    task = tasks["local_triviaqa"]
    assert [task.process_results(task.eval_docs[0], [text])["contains"] for text in ("Alpha", "b")] == [1, 0]


def test_examples_in_the_prompt_come_from_a_split_that_exists(manager):
    tasks = manager.load(["local_arc_easy", "local_piqa"])["tasks"]
    for task, split in zip(tasks.values(), ("validation", "validation")):
        assert list(task.fewshot_docs()) == list(task.dataset[split])
        context = task.fewshot_context(task.eval_docs[3], num_fewshot=2)
        assert context.count("Answer:") == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--metadata data=FOLDER.*piqa/validation.parquet"):
        task_manager(tmp_path).load(["local_piqa"])


@pytest.mark.once
@pytest.mark.skipif(not SHARED.is_dir(), reason="the evaluation data is not at ../shared/data")
def test_the_real_data(folders):
    manager = task_manager(SHARED)
    tasks = manager.load([f"local_{name}" for name in TASKS])["tasks"]
    assert {name: len(task.eval_docs) for name, task in tasks.items()} == {f"local_{k}": n for k, n in ROWS.items()}
    for task in tasks.values():
        for doc in task.eval_docs.select(range(20)):
            text, target = task.doc_to_text(doc), task.doc_to_target(doc)
            if task.config.doc_to_choice:
                choices = task.doc_to_choice(doc)
                gold = text if task.multiple_input else target  # WinoGrande varies the context, not what follows it
                assert len(choices) > 1 and all(choices) and 0 <= int(gold) < len(choices)
            else:
                assert target.strip() and (text.strip() or task.OUTPUT_TYPE == "loglikelihood_rolling")
    assert len(target) == 100_000  # of the last task, the long documents
    results = evaluate(folders / "interdomain", manager, KINDS, limit=2, batch_size=8, max_length=1024)
    assert {counts["effective"] for counts in results["n-samples"].values()} == {2}


# Likelihoods.


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*MIXERS, *EXHAUSTIVE_PAIRS])
@pytest.mark.parametrize("batch_size", [4, "auto"])
def test_batches_answer_as_single_sequences(name, batch_size, folders, manager, single):
    samples = evaluate(folders / name, manager, batch_size=batch_size, max_batch_size=8)["samples"]
    (numbers, texts), (expected, expected_texts) = answers(samples), single(name)
    # Sums over long texts are float32 in the thousands, where 1e-4 is less than their last place: four of these.
    assert len(expected) > 30 and numbers == pytest.approx(expected, rel=4 * 2**-23, abs=1e-4)
    assert len(texts) == 7 and any(texts) and texts == expected_texts


@pytest.mark.parametrize("name", MIXERS)
def test_likelihoods_are_those_of_a_plain_forward(name, folders, manager, single):
    model = AutoModelForCausalLM.from_pretrained(folders / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders / name)
    expected = []
    for task in manager.load(KINDS[:2])["tasks"].values():
        for doc in task.eval_docs:
            choices = task.doc_to_choice(doc) if task.config.doc_to_choice else [task.doc_to_target(doc).strip()]
            for choice in choices:
                context = tokenizer(task.doc_to_text(doc))["input_ids"]
                ids = tokenizer(f"{task.doc_to_text(doc)} {choice}", return_tensors="pt")["input_ids"]
                with torch.no_grad():
                    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
                expected.append(scores[len(context) - 1 :].sum().item())
    assert single(name)[0][: len(expected)] == pytest.approx(expected, rel=0, abs=1e-4)


@pytest.mark.slow
def test_a_sparse_branch_answers_in_batches_as_alone(folders, manager):
    alone, together = (
        answers(evaluate(folders / SLOW, manager, batch_size=size, max_batch_size=8)["samples"]) for size in (1, 4)
    )
    assert len(alone[0]) > 30 and together[0] == pytest.approx(alone[0], rel=0, abs=1e-4)
    assert len(alone[1]) == 7 and any(alone[1]) and together[1] == alone[1]


# Other processes.

# The harness's command, where this package cannot be imported: the code comes from the model's folder.
LM_EVAL = """
import runpy, sys
sys.modules["modeling_interdomain"] = None
runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)
"""


def command_line(launcher, folder, data, output, *arguments, **environment):
    """The answers of `lm_eval`, started as a user starts it in an empty folder, and what it logs."""
    environment |= {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    environment |= {"HF_HOME": str(output / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "run", "--model", "hf", "--device", "cpu", "--tasks", *KINDS]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--metadata", f"data={data}"]
    command += ["--include_path", str(evaluate_tasks.TASKS), "--log_samples", "--output_path", str(output), *arguments]
    done = subprocess.run(command, cwd=output, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    files = {task: next(output.rglob(f"samples_{task}_*.jsonl")) for task in KINDS}
    samples = {task: [json.loads(line) for line in file.open()] for task, file in files.items()}
    return answers(samples), done.stdout + done.stderr


@pytest.mark.slow
def test_command_line_with_the_code_of_the_folder(folders, data, single, tmp_path):
    (numbers, texts), _ = command_line(["-c", LM_EVAL], folders / "interdomain-softmax", data, tmp_path)
    expected, expected_texts = single("interdomain-softmax")
    assert numbers == pytest.approx(expected, rel=0, abs=1e-4) and texts == expected_texts


@pytest.mark.slow
def test_two_processes_answer_as_one(folders, data, single, tmp_path):
    """The harness shares the work only where it counts several GPUs, so it is told of two; the processes have none."""
    (tmp_path / "two.py").write_text(f"import torch\ntorch.cuda.device_count = lambda: 2\n{LM_EVAL}")
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    arguments = [[*launcher, "two.py"], folders / "interdomain", data, tmp_path, "--batch_size", "2"]
    environment = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    (numbers, texts), log = command_line(*arguments, **environment)
    assert "local_wikitext on rank 0" in log and "local_wikitext on rank 1" in log
    expected, expected_texts = single("interdomain")
    # As of batches: float32 in the thousands, rows lie in other batches here.
    assert numbers == pytest.approx(expected, rel=4 * 2**-23, abs=1e-4) and texts == expected_texts


# The example.


@pytest.fixture
def checkpoint(folders, tmp_path):
    shutil.copytree(folders / "interdomain", tmp_path / "mine")
    return tmp_path / "mine"


CARD = """---
license: apache-2.0
tags:
- mine
model-index:
- name: My model
  results:
  - task:
      type: text-generation
    dataset:
      type: held-out-text
      name: my texts
    metrics:
    - type: bits_per_byte
      value: 1.25
---

# My model

What I wrote.
"""


def run_example(checkpoint, data, *arguments):
    return evaluate_tasks.main([str(checkpoint), "--data", str(data), *arguments])


def test_scores_go_into_record_and_card(checkpoint, data, manager):
    arguments = [
        "--tasks",
        "local_commonsense",
        "local_wikitext",
        "--limit",
        "4",
        "--batch-size",
        "4",
        "--max-length",
        "64",
    ]
    assert run_example(checkpoint, data, *arguments) == 0
    record = json.loads((checkpoint / "lm_eval.json").read_text())
    expected = evaluate(checkpoint, manager, ["local_piqa", "local_wikitext"], limit=4, max_length=64)["results"]
    card = ModelCard.load(checkpoint / "README.md")
    assert card.data.model_name == "mine" and card.data.library_name == "transformers"
    found = {(result.dataset_type, result.metric_type): result for result in card.data.eval_results}
    assert len(found) == len(card.data.eval_results) == 17
    for task, metric in [("local_piqa", "acc_norm"), ("local_wikitext", "bits_per_byte")]:
        value = expected[task][f"{metric},none"]
        assert record["results"][task][f"{metric},none"] == pytest.approx(value, rel=1e-6)
        assert found[task, metric].metric_value == pytest.approx(value, abs=1e-4)
        assert f"| {task} | {metric} | {value:.4g} |" in card.text
    assert found["local_piqa", "acc"].dataset_args == {"num_few_shot": 0, "items": "4 of 7"}
    assert found["local_piqa", "acc"].source_name == "lm-evaluation-harness"


@pytest.mark.once
def test_a_card_keeps_its_text_and_a_second_run_replaces_the_first(checkpoint, data):
    (checkpoint / "README.md").write_text(CARD)
    assert run_example(checkpoint, data, "--tasks", "local_wikitext", "local_boolq", "--limit", "2") == 0
    text = (checkpoint / "README.md").read_text()
    (checkpoint / "README.md").write_text(text + "\nWhat I wrote later.\n")
    assert run_example(checkpoint, data, "--tasks", "local_boolq", "local_arc_easy", "--batch-size", "auto") == 0

    card = ModelCard.load(checkpoint / "README.md")
    assert card.data.license == "apache-2.0" and card.data.tags == ["mine"] and card.data.model_name == "My model"
    found = [(result.dataset_type, result.metric_type, result.dataset_args) for result in card.data.eval_results]
    assert [(task, metric) for task, metric, _ in found] == [
        ("held-out-text", "bits_per_byte"),
        ("local_arc_easy", "acc"),
        ("local_arc_easy", "acc_norm"),
        ("local_boolq", "acc"),
        ("local_wikitext", "word_perplexity"),
        ("local_wikitext", "byte_perplexity"),
        ("local_wikitext", "bits_per_byte"),
    ]
    assert [arguments["items"] for _, _, arguments in found[1:]] == ["7 of 7"] * 3 + ["2 of 7"] * 3
    assert card.text.count("| local_boolq | acc |") == card.text.count("## Evaluation") == 1
    assert card.text.count("| local_wikitext |") == 3
    assert card.text.startswith("\n# My model\n\nWhat I wrote.\n\n## Evaluation\n")
    assert card.text.endswith("\n\nWhat I wrote later.\n")


# To these two the harness reads the thousands of tasks that it brings.
UNKNOWN = ["MODEL", "--tasks", "local_piqa", "local_nothing"], "There is no task local_nothing: "
NETWORK = ["MODEL", "--tasks", "piqa"], "A task of the harness's own needs a network: "
MISTAKES = {
    "folder": (["nowhere"], "nowhere is not a folder with a saved model."),
    "task": pytest.param(*UNKNOWN, marks=pytest.mark.slow),
    "data": (["MODEL", "--data", "nowhere"], "nowhere/eval/piqa/validation.parquet does not exist: name the folder"),
    "twice": (["MODEL", "--tasks", "local_recall", "local_drop"], "Duplicate task 'local_drop': found in both "),
    "network": pytest.param(*NETWORK, marks=pytest.mark.slow),
    "limit": (["MODEL", "--limit", "0"], "--limit must be positive, not 0."),
    "length": (["MODEL", "--max-length", "0"], "--max-length must be positive, not 0."),
    "one token": (["MODEL", "--max-length", "1"], "--max-length must be at least 2: a token is scored after another"),
    "batch size": (["MODEL", "--batch-size", "many"], "--batch-size must be a positive number or auto, not many."),
    "no batch": (["MODEL", "--batch-size", "0"], "--batch-size must be a positive number or auto, not 0."),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(checkpoint, data, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    arguments = [str(checkpoint) if x == "MODEL" else x for x in arguments]
    assert evaluate_tasks.main([arguments[0], "--data", str(data), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not {"README.md", "lm_eval.json"} & {path.name for path in checkpoint.iterdir()}


def test_a_missing_harness_is_named(checkpoint, data, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert run_example(checkpoint, data) == 2
    assert capsys.readouterr().err == "lm-eval is not installed: pip install lm-eval.\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("lm_eval.json", "no record", "lm_eval.json is not a record of the harness: move it away."),
        ("lm_eval.json", "[1]", "lm_eval.json is not a record of the harness: move it away."),
        ("lm_eval.json", '{"results": []}', "lm_eval.json is not a record of the harness: move it away."),
        ("lm_eval.json", '{"results": {"a": 1}}', "lm_eval.json is not a record of the harness: move it away."),
        ("README.md", "---\na: [\n---\n", "The metadata at the top of "),
        ("README.md", "---\n- a\n---\n", "The metadata at the top of "),
        ("README.md", "---\nmodel-index: wrong\n---\n", "The metadata at the top of "),
    ],
)
def test_files_that_cannot_be_read_stay_as_they_are(checkpoint, data, capsys, name, content, message):
    (checkpoint / name).write_text(content)
    assert run_example(checkpoint, data) == 2
    assert message in capsys.readouterr().err
    assert (checkpoint / name).read_text() == content


@pytest.mark.once
def test_a_full_disk_leaves_record_and_card(checkpoint, data, capsys, full_disk):
    """At the end of what may have been hours, the scores are at least printed."""
    assert run_example(checkpoint, data, "--tasks", "local_boolq", "--limit", "1") == 0
    kept = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    capsys.readouterr()
    with full_disk(1000):
        assert run_example(checkpoint, data, "--tasks", "local_boolq", "--limit", "2") == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].endswith("what was there is still there.")
    assert "| local_boolq | acc |" in captured.out
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == kept


@pytest.mark.once
def test_a_card_without_metadata_gets_some(checkpoint, data):
    (checkpoint / "README.md").write_text("# Mine\n\nText.\n")
    assert run_example(checkpoint, data, "--tasks", "local_boolq", "--limit", "1") == 0
    card = ModelCard.load(checkpoint / "README.md")
    assert card.text.startswith("# Mine\n\nText.\n\n## Evaluation\n") and len(card.data.eval_results) == 1

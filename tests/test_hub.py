"""From a saved folder to a stranger's process through a hub on this machine, and the ways of loading a folder."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, metadata_load
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples import evaluate_tasks, publish, text_data
from model_cards import model_card
from modeling_interdomain import InterdomainForCausalLM, InterdomainForSequenceClassification
from tests.conftest import ROPE, edit_config
from tests.hub_server import TOKEN, metadata_problem, running_hub, speak_to
from tests.test_examples import some_documents
from tests.test_remote_code import AUTO_MAP

PROMPT = "alpha beta gamma"
# Before, `ModelCard.validate` asked huggingface.co whatever HF_ENDPOINT said; a commit is validated by our hub anyway.
VALIDATES_HERE = Version(version("huggingface_hub")) >= Version("2.2")
REPORT = {"data": "some words", "steps": 30, "tokens_per_step": 64, "bits_per_byte": 2.125, "perplexity": 9.5}
HARNESS = {
    "results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.25, "acc_stderr,none": 0.01, "sample_len": 20}},
    "n-shot": {"arc_easy": 0},
    "n-samples": {"arc_easy": {"original": 2376, "effective": 20}},
}
MORE = {"results": {"piqa": {"acc,none": 0.5}}}

# What every process that talks to the hub begins with: nothing but this machine can be reached.
LOOPBACK_ONLY = """
import sys

def refuse(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1][0] != "127.0.0.1":
        raise OSError(f"{arguments[1]} is not this machine")

sys.addaudithook(refuse)
"""

SENDER = """
from examples import publish
from modeling_interdomain.modeling_interdomain import InterdomainForCausalLM

folder, *options = sys.argv[1:]
if publish.main([folder, "user/newer"]) or publish.main([folder, "user/tiny", *options]):
    sys.exit("not published")
model = InterdomainForCausalLM.from_pretrained(folder)
model.push_to_hub("user/pushed", max_shard_size="60KB")
model.lm_head.weight.data.zero_()
model.push_to_hub("user/newer", max_shard_size="60KB")
"""

STRANGER = """
import importlib.util, json
assert importlib.util.find_spec("examples") is None

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_interdomain":
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hide())
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

prompt, report, results = sys.argv[1], {}, {}
tokenizer = AutoTokenizer.from_pretrained("user/tiny")
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
results["ids"] = inputs["input_ids"]
for repo in ("user/tiny", "user/pushed"):
    model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True).eval()
    with torch.no_grad():
        results[f"{repo} logits"] = model(**inputs).logits
    results[f"{repo} generated"] = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    report[repo] = type(model).__module__
body = AutoModel.from_pretrained("user/tiny", trust_remote_code=True).eval()
with torch.no_grad():
    results["body"] = body(**inputs).last_hidden_state

from huggingface_hub import ModelCard
card = ModelCard.load("user/tiny")
if len(sys.argv) > 2:
    card.validate()
(example,) = [block.split("```")[0] for block in card.text.split("```python")[1:]]
exec(example)
report["example"] = tokenizer.decode(ids[0], skip_special_tokens=True)
save_file({name: x.contiguous() for name, x in results.items()}, "results.safetensors")
open("report.json", "w").write(json.dumps(report))
"""


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), 300)


@pytest.fixture(scope="module")
def folder(make_model, tokenizer, tmp_path_factory):
    """A trained model's folder in three shards, with the results and the leftovers of a run."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    model = make_model("interdomain-softmax", dtype=torch.float32, vocab_size=300, state_dtype="float32")
    model.save_pretrained(path, max_shard_size="60KB")
    tokenizer.save_pretrained(path)
    (path / "results.json").write_text(json.dumps(REPORT))
    (path / "training_args.bin").write_bytes(b"a pickle")
    (path / "held_out.jsonl").write_text('{"text": "kept here"}\n')
    (path / "checkpoint-3").mkdir()
    (path / "checkpoint-3" / "optimizer.pt").write_bytes(b"another")
    (path / "checkpoint-3" / "config.json").write_text("{}")
    (path / "lm_eval.json").write_text(json.dumps(HARNESS))
    (path.parent / "more.json").write_text(json.dumps(MORE))
    return path


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


def run_process(hub, code, arguments, cwd, token=None, **variables):
    """Python in a process of its own, with an empty cache and no hub but ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_", "TRANSFORMERS"))}
    environment = kept | hub.environment(cwd / "hf_home", token) | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-c", LOOPBACK_ONLY + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def published(hub, folder, tmp_path_factory):
    """What `examples.publish` prints; the same process fills a second repository by the plain `push_to_hub`."""
    options = ["--language", "en", "--datasets", "wikitext", "--evaluation", folder.parent / "more.json"]
    cwd, path = tmp_path_factory.mktemp("sender"), str(publish.REPOSITORY)
    return run_process(hub, SENDER, [folder, *options], cwd, TOKEN, PYTHONPATH=path)


@pytest.fixture(scope="module")
def stranger(hub, published, tmp_path_factory):
    """What a process without this repository, its package, its cache or a token computes from the two names."""
    cwd = tmp_path_factory.mktemp("stranger")
    run_process(hub, STRANGER, [PROMPT, *(["validate"] if VALIDATES_HERE else [])], cwd)
    return load_file(cwd / "results.safetensors"), json.loads((cwd / "report.json").read_text())


# ------------------------------------------------------------------------------------------ what arrives


def test_everything_a_stranger_needs_is_sent(hub, published, folder):
    files = hub.repositories["user/tiny"].files
    needed = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "LICENSE"}
    assert needed | {"tokenizer_config.json", "README.md", "results.json"} <= set(files)
    assert {name for name in files if name.endswith(".py")} == {path.name for path in folder.glob("*.py")}
    assert AUTO_MAP.items() <= json.loads(files["config.json"])["auto_map"].items()
    shards = {name for name in files if name.endswith(".safetensors")}
    assert shards == set(json.loads(files["model.safetensors.index.json"])["weight_map"].values()) and len(shards) > 1
    assert files["LICENSE"] == (publish.REPOSITORY / "LICENSE").read_bytes()
    for name, data in files.items():
        assert data == (folder / name).read_bytes()


def test_no_pickle_and_no_leftover_is_sent(hub, published):
    files = set(hub.repositories["user/tiny"].files)
    assert not {"training_args.bin", "held_out.jsonl"} & files and not [name for name in files if "/" in name]
    assert "Not sent: checkpoint-3/, held_out.jsonl, training_args.bin" in published
    assert f"\n{hub.endpoint}/user/tiny/commit/{hub.repositories['user/tiny'].commits[-1].oid}\n" in published


def test_push_to_hub_alone_carries_the_code(hub, published, folder):
    """Of a class that was only imported: nobody called `register_for_auto_class`."""
    files = hub.repositories["user/pushed"].files
    assert {name for name in files if name.endswith(".py")} == {path.name for path in folder.glob("*.py")}
    assert AUTO_MAP.items() <= json.loads(files["config.json"])["auto_map"].items()
    assert not any(name.endswith((".bin", ".pt")) for name in files)


def test_new_weights_leave_the_rest_as_it_was(hub, published):
    """A plain `push_to_hub` to what was published replaces weights, not card, tokenizer and licence."""
    published, pushed = (commit.files for commit in hub.repositories["user/newer"].commits[-2:])
    assert ModelCard(pushed["README.md"].decode()).text == ModelCard(published["README.md"].decode()).text
    kept = {name for name in published if published[name] == pushed[name]}
    assert {"LICENSE", "tokenizer.json", "results.json", "generation_config.json"} <= kept
    assert any(name.endswith(".safetensors") and name not in kept for name in pushed)


def test_a_stranger_computes_the_same(stranger, folder, tokenizer):
    results, report = stranger
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    assert torch.equal(results["ids"], inputs["input_ids"])
    with torch.no_grad():
        logits = model(**inputs).logits
        torch.testing.assert_close(results["body"], model.model(**inputs).last_hidden_state, rtol=0, atol=0)
    generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    for repo in ("user/tiny", "user/pushed"):
        assert report[repo].startswith("transformers_modules.user.")
        torch.testing.assert_close(results[f"{repo} logits"], logits, rtol=0, atol=0)
        assert torch.equal(results[f"{repo} generated"], generated)


def test_the_example_of_the_card_runs(stranger):
    _, report = stranger
    assert report["example"].startswith("Once upon a time")


ELSEWHERE = """
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

sys.modules["modeling_interdomain"] = None
model = AutoModelForCausalLM.from_pretrained("user/weights", trust_remote_code=True).eval()
body = AutoModel.from_pretrained("user/weights", trust_remote_code=True).eval()
ids = torch.arange(5, 25)[None]
with torch.no_grad():
    found = {"logits": model(ids).logits, "body": body(ids).last_hidden_state}
save_file(found, "results.safetensors")
print(type(model).__module__, type(model.config).__module__)
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
with torch.no_grad():
    assert torch.equal(again(ids).logits, found["logits"])
"""


@pytest.mark.once
def test_weights_in_one_repository_and_code_in_another(here, fresh, tmp_path):
    for _ in range(2):  # what was there, code beside the weights too, is replaced
        assert publish.main([str(fresh), "user/weights"]) == 0
        assert publish.main([str(fresh), "user/weights", "--code-repo", "user/code"]) == 0
    files, code = (here.repositories[name].files for name in ("user/weights", "user/code"))
    assert not any(name.endswith(".py") for name in files) and "model.safetensors" in files
    expected = {kind: f"user/code--{path}" for kind, path in AUTO_MAP.items()}
    assert json.loads(files["config.json"])["auto_map"] == expected
    assert {"LICENSE", "README.md", "modeling_interdomain.py", "mixers_ssd_mixer.py"} <= set(code)
    assert not any(name.endswith((".safetensors", ".json")) for name in code)
    printed = run_process(here, ELSEWHERE, [], tmp_path)
    assert all(module.startswith("transformers_modules.user.code.") for module in printed.split())
    results, model = load_file(tmp_path / "results.safetensors"), AutoModelForCausalLM.from_pretrained(fresh).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(results["logits"], model(ids).logits)
        torch.testing.assert_close(results["body"], model.model(ids).last_hidden_state)


def test_a_model_that_came_without_its_code_is_published_so(here, fresh):
    """As it was downloaded: its configuration names the repository of the code."""
    for path in fresh.glob("*.py"):
        path.unlink()
    named = {kind: f"user/code--{path}" for kind, path in AUTO_MAP.items()}
    edit_config(fresh, auto_map=named)
    assert publish.main([str(fresh), "user/again"]) == 0
    files = here.repositories["user/again"].files
    assert "model.safetensors" in files and not any(name.endswith(".py") for name in files)
    assert json.loads(files["config.json"])["auto_map"] == named


def test_a_repository_for_code_is_another_one(fresh, capsys):
    assert publish.main([str(fresh), "user/same", "--code-repo", "user/same"]) == 2
    assert "holds its code without being told to: leave --code-repo out" in capsys.readouterr().err


def test_a_model_is_no_repository_for_code(here, fresh, capsys):
    """Neither its weights nor its card make room for code."""
    assert publish.main([str(fresh), "user/model"]) == 0
    before = dict(here.repositories["user/model"].files)
    assert publish.main([str(fresh), "user/other", "--code-repo", "user/model"]) == 2
    assert "user/model holds a model: nothing was sent" in capsys.readouterr().err
    assert here.repositories["user/model"].files == before and "user/other" not in here.repositories


def test_the_code_of_a_tokenizer_stays_beside_the_weights(here, fresh):
    edit_config(fresh, auto_map=AUTO_MAP | {"AutoTokenizer": ["words.Words", None]})
    (fresh / "words.py").write_text("class Words: ...\n")
    assert publish.main([str(fresh), "user/words_here", "--code-repo", "user/code"]) == 0
    files = here.repositories["user/words_here"].files
    assert [name for name in files if name.endswith(".py")] == ["words.py"]
    assert json.loads(files["config.json"])["auto_map"]["AutoTokenizer"] == ["words.Words", None]


def test_the_code_of_a_tokenizer_stays_in_its_repository(here, fresh):
    """Slow and fast, of which one may be missing."""
    edit_config(fresh, auto_map=AUTO_MAP | {"AutoTokenizer": ["user/words--words.Words", None]})
    assert publish.main([str(fresh), "user/words_apart", "--code-repo", "user/code"]) == 0
    named = json.loads(here.repositories["user/words_apart"].files["config.json"])["auto_map"]
    assert named["AutoTokenizer"] == ["user/words--words.Words", None]
    assert named["AutoConfig"] == "user/code--configuration_interdomain.InterdomainConfig"


# ------------------------------------------------------------------------------------------ the card


def test_metadata_by_the_clients_own_parser(published, folder):
    metadata = metadata_load(folder / "README.md")
    expected = {"license": "apache-2.0", "library_name": "transformers", "pipeline_tag": "text-generation"}
    assert expected.items() <= metadata.items()
    assert metadata["language"] == ["en"] and metadata["datasets"] == ["wikitext"]
    assert {"interdomain-attention", "arxiv:2605.24330"} <= set(metadata["tags"])
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert name == "tiny" and eval_results_to_model_index(name, results) == metadata["model-index"]
    found = {(result.dataset_type, result.metric_type): result.metric_value for result in results}
    ours = {("held-out", "bits_per_byte"): 2.125, ("held-out", "perplexity"): 9.5}
    assert found == ours | {("arc_easy", "acc"): 0.25, ("piqa", "acc"): 0.5}


def test_figures_are_those_of_the_model(published, folder):
    text = ModelCard.load(folder / "README.md").text
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = model.config.state_sizes(model.config.max_position_embeddings)
    assert f"{model.num_parameters():,} parameters: 2 layers (1 interdomain, 1 softmax)" in text
    assert f"| recurrent state | {sizes['recurrent']:,}, whatever the length |" in text
    assert f"{sizes['keys_values']:,}, growing" in text and f"| {2 * sizes['keys_values']:,} |" in text
    assert "| some words | bits per byte | 2.125 |" in text and "- Tokens seen: 1,920" in text
    assert "| arc_easy (0-shot, 20 of 2,376 items) | acc | 0.25 |" in text
    assert 'from_pretrained("user/tiny", trust_remote_code=True)' in text and "2605.24330" in text
    assert not set("{}") & set(text.partition("## Citation")[0])


@pytest.mark.parametrize(
    ("name", "model_class", "changes", "task", "says", "never"),
    [
        ("softmax", InterdomainForCausalLM, {}, "text-generation", "is a control", "fixed size"),
        ("s4d", InterdomainForCausalLM, {}, "text-generation", "2 layers (all s4d)", "A query is compared"),
        (
            "interdomain",
            InterdomainForCausalLM,
            {"sparse_attention": "hax"},
            "text-generation",
            "memory of the sparse branches",
            "growing with the length",
        ),
        (
            "interdomain",
            InterdomainForSequenceClassification,
            {"patch_size": 4, "num_labels": 3},
            "image-classification",
            "squares of 4 pixels",
            "AutoTokenizer",
        ),
        (
            "interdomain",
            InterdomainForSequenceClassification,
            {"num_labels": 3},
            "text-classification",
            "AutoModelForSequenceClassification",
            "model.generate",
        ),
    ],
    ids=["softmax", "s4d", "sparse", "images", "classifier"],
)
def test_the_card_fits_the_kind_of_model(make_model, tmp_path, name, model_class, changes, task, says, never):
    model = make_model(name, model_class, dtype=torch.float32, **changes)
    model.save_pretrained(tmp_path)
    card = model_card.render(tmp_path, "user/other")
    assert card.data.pipeline_tag == task and metadata_problem(str(card)) is None
    assert says in card.text and never not in card.text
    assert f"{model.num_parameters():,} parameters" in card.text
    assert "Not documented" in card.text and "No results were given." in card.text and "model-index" not in str(card)


def test_a_card_cites_the_papers_of_its_parts(make_config):
    def numbers(**fields) -> set[str]:
        return set(model_card.cited(make_config(**fields)))

    assert numbers() == {"2605.24330"}
    assert numbers(token_mixers="ssd") == {"2605.24330", "2405.21060"}
    assert numbers(token_mixers="ssd", rope_parameters=ROPE, rope_placement="before") == {
        *("2605.24330", "2405.21060", "2407.16958"),
    }
    assert numbers(token_mixers="selective_scan", sparse_attention="hax") == {"2605.24330", "2312.00752", "2507.00449"}
    assert numbers(feed_forwards="cdmoe") == {"2605.24330", "2407.16958"}


@pytest.fixture
def here(hub, monkeypatch):
    speak_to(hub, publish, monkeypatch)
    return hub


@pytest.fixture
def fresh(make_model, tokenizer, tmp_path):
    """A folder of its own to spoil."""
    path = tmp_path / "fresh"
    make_model("interdomain", dtype=torch.float32, vocab_size=300).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.skipif(not VALIDATES_HERE, reason="huggingface_hub before 2.2 validates cards at huggingface.co alone")
def test_the_validator_refuses_a_broken_card(here, fresh):
    card = model_card.render(fresh, "user/fresh")
    card.validate()
    broken = ModelCard(str(card).replace("pipeline_tag: text-generation", "pipeline_tag: oracle"))
    with pytest.raises(ValueError, match="pipeline_tag"):
        broken.validate()


def test_somebodys_own_card_is_completed(here, fresh):
    own = "# My own words\n\n## Limits\n\nNone that I know.\n"
    (fresh / "README.md").write_text(f"---\nlicense: mit\n---\n\n{own}")
    for language in ("en", "de"):  # the second time, too, what is there stays
        assert publish.main([str(fresh), "user/words", "--language", language]) == 0
        card = ModelCard(here.repositories["user/words"].files["README.md"].decode())
        assert card.text.strip().startswith(own.strip()) and card.text.count("## Limits") == 1
        assert card.text.count("## How to use it") == card.text.count("## Citation") == 1
        assert (card.data.license, card.data.library_name, card.data.language) == ("mit", "transformers", ["en"])


def test_what_was_put_into_somebodys_own_card_follows_the_model(here, fresh):
    """The second time between what was written before and after; their own words and results stay."""
    begin, end = "# My own words\n\n## Limits\n\nNone that I know.", "\nWritten later.\n"
    result = {"task": {"type": "text-generation"}, "dataset": {"type": "mine", "name": "mine"}}
    index = [{"name": "words", "results": [result | {"metrics": [{"type": "laughs", "value": 3}]}]}]
    (fresh / "README.md").write_text(f"---\nmodel-index: {json.dumps(index)}\n---\n\n{begin}\n")
    reports = ({"perplexity": 20.5, "steps": 30}, {"perplexity": 10.25, "steps": 60}, {"bits_per_byte": 2.5})
    for report in reports:
        (fresh / "results.json").write_text(json.dumps(report))
        (fresh / "lm_eval.json").write_text(json.dumps(HARNESS if "steps" in report else MORE))
        assert publish.main([str(fresh), "user/words"]) == 0
        if report is reports[0]:
            (fresh / "README.md").write_text((fresh / "README.md").read_text() + end)
    card = ModelCard(here.repositories["user/words"].files["README.md"].decode())
    found = {(result.dataset_type, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert found == {("mine", "laughs"): 3, ("held-out", "bits_per_byte"): 2.5, ("piqa", "acc"): 0.5}
    assert "| bits per byte | 2.5 |" in card.text and "| piqa | acc | 0.5 |" in card.text
    assert not [old for old in ("20.5", "10.25", "Steps", "arc_easy") if old in card.text]
    assert card.text.count("## Training") == card.text.count("## Limits") == card.text.count("Written later.") == 1
    assert card.text.strip().startswith(begin) and card.text.endswith(f"{model_card.END}\n{end}")


@pytest.mark.parametrize("marker", [model_card.START, model_card.END])
def test_a_part_without_its_marker_is_somebodys_own(fresh, marker):
    card = model_card.complete(ModelCard("# Mine\n"), model_card.render(fresh, "user/mine", {"perplexity": 20.5}))
    own = ModelCard(str(card).replace(marker, "") + "Written later.\n")
    text = own.text
    assert model_card.complete(own, model_card.render(fresh, "user/mine", {"perplexity": 10.25})).text == text


def test_what_is_no_number_is_no_figure(fresh):
    report = {"perplexity": True, "accuracy": "high", "bits_per_byte": float("nan"), "steps": None, "tokens": "many"}
    card = model_card.render(fresh, "user/other", report)
    assert card.data.eval_results is None
    assert "Not documented" in card.text and "No results were given." in card.text


def test_our_card_follows_the_model(here, fresh):
    for perplexity, options in ((20.5, ["--language", "en"]), (10.25, [])):
        (fresh / "results.json").write_text(json.dumps({"perplexity": perplexity}))
        assert publish.main([str(fresh), "user/follows", *options]) == 0
        card = ModelCard(here.repositories["user/follows"].files["README.md"].decode())
        assert [result.metric_value for result in card.data.eval_results] == [perplexity]
        assert f"| perplexity | {perplexity:g} |" in card.text and card.data.language == ["en"]


def test_dry_run_sends_and_writes_nothing(here, fresh, capsys):
    before, count = sorted(fresh.iterdir()), len(here.requests)
    assert publish.main([str(fresh), "user/dry", "--dry-run"]) == 0
    assert sorted(fresh.iterdir()) == before and len(here.requests) == count and "user/dry" not in here.repositories
    output = capsys.readouterr().out
    assert "model.safetensors" in output and "license: apache-2.0" in output and "LICENSE" in output


def test_weights_of_before_are_removed(here, fresh):
    """A single file left beside new shards would be what a stranger loads."""
    model = InterdomainForCausalLM.from_pretrained(fresh)
    for size in ("50GB", "60KB", "50GB"):
        model.save_pretrained(fresh, max_shard_size=size)
        assert publish.main([str(fresh), "user/shards"]) == 0
        sent = {name for name in here.repositories["user/shards"].files if name.startswith("model")}
        assert sent == {path.name for path in fresh.glob("model*")} and ("model.safetensors" in sent) == (
            size == "50GB"
        )


def test_private_is_private(here, fresh):
    assert publish.main([str(fresh), "user/secret", "--private"]) == 0
    assert here.repositories["user/secret"].private


# ------------------------------------------------------------------------------------------ ways of loading


@pytest.fixture(scope="module")
def sharded(make_model, tmp_path_factory):
    """A model of all three mixers and its folder of many shards."""
    mixers = ["interdomain", "softmax", "s4d", "interdomain"]
    changes = {"token_mixers": mixers, "num_hidden_layers": 4, "state_dtype": "float32"}
    model = make_model("interdomain-softmax", dtype=torch.float32, **changes)
    path = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(path, max_shard_size="20KB")
    return model, path


def same_as(model, loaded, ids):
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    return torch.equal(loaded.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_safetensors": True}, {"device_map": "auto"}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}],
    ids=["plain", "safetensors", "auto", "cpu", "low-memory"],
)
def test_shards_load_whole(sharded, random_ids, options):
    model, path = sharded
    assert len(list(path.glob("*.safetensors"))) > 5
    loaded = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    assert same_as(model, loaded, random_ids(2, 9))


def test_layers_on_the_disk(sharded, random_ids, tmp_path):
    """A limit on the memory puts what is left over on the disk, and it is read when its layer runs."""
    model, path = sharded
    limits = {"device_map": "auto", "max_memory": {"cpu": 60_000}, "offload_folder": tmp_path}
    loaded = AutoModelForCausalLM.from_pretrained(path, **limits).eval()
    assert {"cpu", "disk"} == set(loaded.hf_device_map.values())
    assert any(parameter.device.type == "meta" for parameter in loaded.parameters())
    assert same_as(model, loaded, random_ids(2, 9))


def test_one_layer_on_the_disk(sharded, random_ids, tmp_path):
    model, path = sharded
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_embs", "lm_head"], "cpu")
    places |= {f"model.layers.{i}": "disk" if i == 2 else "cpu" for i in range(4)}
    loaded = AutoModelForCausalLM.from_pretrained(path, device_map=places, offload_folder=tmp_path).eval()
    assert loaded.model.layers[2].mlp.up_proj.weight.device.type == "meta"
    assert same_as(model, loaded, random_ids(2, 9))


@pytest.mark.parametrize("options", [{}, {"device_map": "auto"}], ids=["plain", "auto"])
def test_bfloat16_keeps_the_recurrence_in_float32(sharded, random_ids, options):
    model, path = sharded
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options).eval()
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == (torch.float32 if ".recurrence." in name else torch.bfloat16), name
        if ".recurrence." in name:
            assert torch.equal(parameter, model.get_parameter(name))
    ids = random_ids(2, 9)
    with torch.no_grad():
        difference = (loaded(ids).logits.float() - model(ids).logits).norm() / model(ids).logits.norm()
    assert 0 < difference < 0.1


def test_weights_are_never_pickled(sharded, tmp_path):
    """Neither in one file nor in shards, and weights that are a pickle are not read where safetensors are asked for."""
    model, path = sharded
    model.save_pretrained(tmp_path)
    for place in (path, tmp_path):
        assert {file.suffix for file in place.iterdir()} == {".json", ".py", ".safetensors"}
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)


def test_only_the_last_part_between_the_markers_is_ours():
    own = f"What {model_card.START} means.\n"
    assert model_card.own_text(f"{own}{model_card.START}\nours\n{model_card.END}\nend") == (own, "\nend")


def test_what_is_no_number_is_no_result():
    record = {"results": {"task": {"ppl,none": float("nan"), "acc,none": "N/A", "f1,none": 0.5}}}
    assert [result.metric_type for result in model_card.harness_results(record)] == ["f1"]
    table = {"n-samples": {}, "n-shot": {}}
    assert [score.metric for score in evaluate_tasks.scores(record | table)] == ["f1"]


def test_a_list_of_shards_beside_a_single_file_is_not_sent(here, fresh):
    """`from_pretrained` reads the single file."""
    (fresh / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    assert publish.weight_files(fresh) == ["model.safetensors"]
    assert publish.main([str(fresh), "user/single"]) == 0
    files = here.repositories["user/single"].files
    assert "model.safetensors" in files and "model.safetensors.index.json" not in files


def test_hidden_files_stay_here(here, fresh):
    (fresh / ".secrets.json").write_text("{}")
    (fresh / "curve.csv").write_text("1\n")
    assert publish.main([str(fresh), "user/hidden"]) == 0
    files = here.repositories["user/hidden"].files
    assert ".secrets.json" not in files and "curve.csv" in files


def test_what_was_told_of_data_and_licence_is_kept(here, fresh):
    (fresh / "LICENSE").write_text("Mine.\n")
    for options in (["--datasets", "wikitext"], []):
        assert publish.main([str(fresh), "user/kept", *options]) == 0
        files = here.repositories["user/kept"].files
        assert ModelCard(files["README.md"].decode()).data.datasets == ["wikitext"]
        assert "[wikitext](https://huggingface.co/datasets/wikitext)" in files["README.md"].decode()
        assert files["LICENSE"] == b"Mine.\n"
    (fresh / "README.md").write_text(
        (fresh / "README.md").read_text().replace("datasets:\n- wikitext", "datasets: wikitext")
    )
    assert publish.main([str(fresh), "user/kept"]) == 0
    assert ModelCard(here.repositories["user/kept"].files["README.md"].decode()).data.datasets == ["wikitext"]


def test_who_may_read_is_the_hubs_default_unless_private(here, fresh, monkeypatch):
    """An organisation may have said that its repositories are private."""
    asked, create = [], publish.HfApi().create_repo.__func__
    monkeypatch.setattr(
        HfApi, "create_repo", lambda *args, **given: asked.append(given["private"]) or create(*args, **given)
    )
    for options in ([], ["--private"]):
        assert publish.main([str(fresh), f"user/asked{len(options)}", *options]) == 0
    assert asked == [None, True]


def test_code_may_move_to_another_repository(here, fresh):
    config = json.loads((fresh / "config.json").read_text())
    config["auto_map"] = {kind: f"user/old--{path}" for kind, path in config["auto_map"].items()}
    source, plain = fresh, fresh.parent / "plain"
    (fresh / "config.json").write_text(json.dumps(config))
    plain.mkdir()
    publish.write_without_code(source, ["config.json"], [], "user/new", plain)
    written = json.loads((plain / "config.json").read_text())["auto_map"]
    assert all(path.startswith("user/new--") and path.count("--") == 1 for path in written.values())


def test_rotary_embeddings_alone_are_of_no_paper(make_config):
    config = make_config(rope_parameters=ROPE, rope_placement="before", feature_dim=6)
    assert set(model_card.cited(config)) == {"2605.24330"}


def test_a_model_with_branches_is_compared_with_softmax_alone(make_config):
    assert model_card.softmax_size(make_config(sparse_attention="hax"), 64) == model_card.softmax_size(
        make_config(), 64
    )


def test_results_of_the_harness_are_named_as_it_names_them():
    figures = {"acc,none": 0.5, "acc,strict": 0.25, "acc_stderr,none": 0.1, "sample_len": 7, "alias": "task"}
    counts = {"n-samples": {"task": {"effective": 20, "original": 20}}}
    found = model_card.harness_results({"results": {"task": figures}} | counts)
    assert [(x.metric_name, x.metric_value) for x in found] == [("acc", 0.5), ("acc (strict)", 0.25)]
    assert found[0].dataset_name == "task (20 of 20 items)"


def test_training_is_told_in_tokens_and_hours():
    facts = model_card.training_facts({"steps": 30, "tokens_per_step": 64, "training_seconds": 5400}, [])
    assert facts == ["Steps: 30", "Tokens seen: 1,920", "Time: 1.5 hours"]
    facts = model_card.training_facts({"tokens": 2.5e9, "training_seconds": 400_000}, [])
    assert facts == ["Tokens seen: 2,500,000,000", "Time: 111 hours"]


def test_a_model_of_softmax_alone_is_no_linear_attention(make_model, tmp_path):
    make_model("softmax", dtype=torch.float32).save_pretrained(tmp_path)
    assert model_card.render(tmp_path, "user/control").data.tags == ["interdomain", "arxiv:2605.24330"]


WEIGHED = "which its softmax weighs as one more key"
FIXED = "whatever the length |\n| for comparison"


@pytest.mark.parametrize(
    ("name", "changes", "says", "never"),
    [
        ("window", {}, [WEIGHED, FIXED], "growing"),
        ("window", {"window_share": "sigmoid"}, ["instead of the tokens between and reads"], "as one more key"),
        ("cheems", {}, ["of the attention layers", ", growing with the length"], "All layers"),
        ("interdomain-softmax", {"dynamic_mask": "position"}, ["a number for each of"], "Nothing in the recurrence"),
        ("interdomain-softmax", {"dynamic_mask": "hard"}, ["a number for each of"], "Nothing in the recurrence"),
        ("experts", {}, ["a token uses 6 of 48 experts of one neuron each"], FIXED),
        ("softmax", {}, ["All layers are softmax attention", "are longer than the configuration"], "No layer"),
        ("softmax", {"dynamic_mask": "position"}, ["longer texts are refused"], "are longer than the configuration"),
        ("softmax, cdmoe", {}, ["a token uses ", "All layers are softmax attention"], "No layer"),
        ("inner-function", {"token_mixers": "inner_function"}, ["No layer has a recurrent state"], "All layers are"),
        ("gated", {}, ["weigh those of the values.\n"], "Each token says"),
        ("delta-rule", {}, ["Each token says how much of them is left", "is already answered"], "time moves"),
        ("warped-time", {}, ["Each token says by how much time moves."], "already answered"),
    ],
)
def test_the_card_says_what_its_layers_do(make_model, tmp_path, name, changes, says, never):
    make_model(name, dtype=torch.float32, **changes).save_pretrained(tmp_path)
    text = model_card.render(tmp_path, "user/other").text
    assert all(words in text for words in says) and never not in text
    assert "\n\n\n- " not in text and "\n| numbers" not in text.replace("\n\n| numbers", "")


def test_sections_behind_what_was_inserted_are_somebodys_own(fresh):
    """They are not inserted a second time, and nothing is, once all are theirs."""
    new = model_card.render(fresh, "user/mine")
    text = str(model_card.complete(ModelCard("# Mine\n"), new))
    own = model_card.complete(ModelCard(f"{text}\n## Limits\n\nNone.\n"), new).text
    assert own.count("## Limits") == 1 and own.endswith("## Limits\n\nNone.\n")
    sections = new.text.replace(model_card.MARKER, "")
    own = model_card.complete(ModelCard(f"{text}\n{sections}"), new).text
    assert own.count("## Training") == 1 and model_card.START not in own

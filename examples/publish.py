"""Send a saved model to the Hub with all that a stranger needs: weights, code, tokenizer, model card, licence.

Usage:
    python -m examples.publish runs/mine user/mine --dry-run     # checks everything, says what would be sent
    python -m examples.publish runs/mine user/mine --language en --datasets wikitext

    python -m examples.publish runs/mine user/mine --code-repo user/code     # weights in one, code in another

The card is rendered from `model_cards/template.md`, the configuration, and what the folder's results.json and
lm_eval.json have measured. A README.md with words of your own keeps them and is given what it lacks, between two
comments and renewed each time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
import yaml
from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from examples.saved_model import check_fits, load_model, load_tokenizer, one_line, read_config, replace_text
from examples.text_data import InputError, exit_code
from model_cards.model_card import MARKER, auto_class, complete, harness_results, render
from modeling_interdomain.saving.code import ENTRIES, flat_code, write_code

REPOSITORY = Path(__file__).resolve().parents[1]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-?????-of-?????.safetensors"
CODE_CARD = """---
license: apache-2.0
library_name: transformers
---

The code of Interdomain models, for `trust_remote_code=True`: checkpoints elsewhere name it in their `auto_map`.
"""
# What is sent beside weights and code: configuration, tokenizer, results, card and its pictures. Never a pickle.
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".png", ".csv")


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that `from_pretrained` reads."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
            missing = [name for name in files if not (folder / name).is_file()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder / INDEX} is not a list of weight files: save the model again.") from error
        if missing:
            raise InputError(f"{folder} lacks the weight files {', '.join(missing)}, which {INDEX} names.")
        return files
    if pickles := sorted(path.name for path in folder.glob("*.bin")):
        raise InputError(
            f"{folder} has no safetensors, only pickles ({', '.join(pickles)}): load and save the model again."
        )
    raise InputError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}.")


def load_config(folder: Path) -> PreTrainedConfig:
    """The configuration, which must be one of ours."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a folder with a saved model: it has no config.json.")
    config = read_config(folder)
    if config.model_type != "interdomain":
        raise InputError(f"{folder} holds a model of type {config.model_type}, and the card is for interdomain models.")
    return config


def code_files(folder: Path, config: PreTrainedConfig) -> list[str]:
    """The Python files that `trust_remote_code` reads, all of which must be there but those of another repository."""
    again = "load the model and save it again, which writes the code beside it"
    references = [path for paths in (getattr(config, "auto_map", None) or {}).values() for path in as_list(paths)]
    if not references:
        raise InputError(f"{folder / 'config.json'} names no code (auto_map): {again}.")
    entries = sorted({reference.split(".")[0] + ".py" for reference in references if "--" not in reference})
    try:
        imported = [Path(path).name for entry in entries for path in get_relative_import_files(folder / entry)]
    except FileNotFoundError as error:
        raise InputError(f"{folder} lacks the code {Path(error.filename).name}: {again}.") from error
    return sorted({*entries, *imported})


def check_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Load the model as a user would, and refuse what nobody could use."""
    model = load_model(folder, getattr(transformers, auto_class(config)), use_safetensors=True)
    if broken := [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]:
        raise InputError(f"{len(broken)} weights of {folder} are not finite, for example {broken[0]}.")


def check_tokenizer(folder: Path, config: PreTrainedConfig) -> None:
    check_fits(load_tokenizer(folder), config, folder)


def read_json(path: Path) -> dict:
    """The object in a file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable JSON file.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object, that is {{...}}: remove it, or write it again.")
    return found


def make_card(options: argparse.Namespace) -> ModelCard:
    """The rendered card, or somebody's own with what it lacks."""
    report = read_json(options.folder / "results.json") if (options.folder / "results.json").is_file() else {}
    results = []
    record = options.folder / "lm_eval.json"
    for path in [*([record] if record.is_file() else []), *options.evaluation]:
        found = read_json(path)
        try:
            results += harness_results(found)
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f'{path} is not a file of results of lm-eval: it has no "results" by task.') from error
    old = load_card(options.folder)
    language = options.language or as_list(old and old.data.language)
    datasets = options.datasets or as_list(old and old.data.datasets)
    fresh = render(options.folder, options.repo, report, results, language, datasets)
    return fresh if old is None or MARKER in old.text else complete(old, fresh)


def load_card(folder: Path) -> ModelCard | None:
    """The card that is there."""
    path = folder / "README.md"
    try:
        return ModelCard.load(path) if path.is_file() else None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"The metadata of {path} cannot be read: repair or remove it.") from error


def as_list(value: str | list | None) -> list[str]:
    """Metadata may hold one name or several, and None where a kind of tokenizer has no class."""
    return [value] if isinstance(value, str) else [name for name in value or () if name is not None]


def write_card(card: ModelCard, folder: Path) -> None:
    """README.md and LICENSE; a failure leaves those that were there."""
    try:
        replace_text(folder / "README.md", str(card))
        if not (folder / "LICENSE").exists():
            replace_text(folder / "LICENSE", (REPOSITORY / "LICENSE").read_text())
    except OSError as error:
        raise InputError(f"{folder} could not be written ({error}): nothing was sent.") from error


def files_to_send(folder: Path, weights: Sequence[str], code: Sequence[str]) -> list[str]:
    """What is sent of the folder, by name; hidden files, folders and whatever may be a pickle stay here."""
    extra = [
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".") and path.name != INDEX
    ]
    index = [INDEX] if list(weights) != [WEIGHTS] else []
    return sorted({*weights, *code, *extra, *index, "README.md", "LICENSE"})


def write_code_folder(folder: Path) -> list[str]:
    """The code of every model of this package, for a repository of its own; returns the names of the files."""
    write_code(None, folder)
    (folder / "LICENSE").write_bytes((REPOSITORY / "LICENSE").read_bytes())
    (folder / "README.md").write_text(CODE_CARD)
    return sorted(path.name for path in folder.iterdir())


def write_without_code(source: Path, files: Sequence[str], code: Sequence[str], code_repo: str, folder: Path) -> None:
    """Links to the files of a checkpoint but for its code, which its configuration then names in another repository."""
    for name in set(files) - {*code, "config.json"}:
        (folder / name).symlink_to((source / name).resolve())
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {kind: elsewhere(paths, code_repo) for kind, paths in config["auto_map"].items()}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def elsewhere(paths: str | list, code_repo: str) -> str | list:
    """What an auto_map names, with the classes of this package in another repository; others stay where they are."""
    if isinstance(paths, list):  # the slow and the fast class of a tokenizer
        return paths
    path = paths.split("--")[-1]
    return f"{code_repo}--{path}" if path.split(".")[0] in ENTRIES else paths


def send(options: argparse.Namespace, repo: str, folder: Path, files: Sequence[str]) -> str:
    """Create a repository if need be, and upload; the address of the commit."""
    if get_token() is None:
        raise InputError("You are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    # What a stranger would load instead: weights of before, and code beside weights whose code is elsewhere.
    holds_code = repo == options.code_repo
    before = [*([] if holds_code else [WEIGHTS, SHARDS, INDEX]), *(["*.py"] if options.code_repo else [])]
    try:
        repo = api.create_repo(repo, private=options.private or None, exist_ok=True).repo_id
        there = api.model_info(repo) if holds_code or options.private else None
        if holds_code and "config.json" in {file.rfilename for file in there.siblings or ()}:
            raise InputError(f"{repo} holds a model: nothing was sent; give --code-repo a repository of code alone.")
        if options.private and not there.private:
            raise InputError(
                f"{repo} exists and is public: nothing was sent; make it private first, or omit --private."
            )
        return str(
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=list(files),
                delete_patterns=before,
                commit_message=f"Upload {options.folder.resolve().name}",
            )
        )
    except InputError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = {401: "log in with `hf auth login`.", 403: "may this token write there?"}.get(status, one_line(error))
        raise InputError(f"The Hub refused {repo} (status {status}): {advice}") from error
    except ValueError as error:  # the Hub's check of the metadata, before anything is sent
        raise InputError(f"{repo} was not updated: README.md: {one_line(error).removeprefix('- ')}") from error
    except Exception as error:  # no network, an upload that broke off
        raise InputError(f"{repo} was not updated: {one_line(error)} Run the same command again.") from error


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a model that save_pretrained wrote, with its tokenizer")
    parser.add_argument("repo", help="the repository on the Hub, user/name")
    parser.add_argument("--private", action="store_true", help="only you can see a repository that is created")
    parser.add_argument("--dry-run", action="store_true", help="check, print the card and what would be sent; no more")
    parser.add_argument(
        "--code-repo", help="put the code into this repository, user/name, and only name it in this one"
    )
    parser.add_argument("--language", nargs="+", default=[], help="of the training text, such as: en de code")
    parser.add_argument("--datasets", nargs="+", default=[], help="names on the Hub of the training data")
    parser.add_argument("--evaluation", nargs="+", default=[], type=Path, help="more files of results of lm-eval")
    return parser.parse_args(arguments)


def check_name(repo: str) -> None:
    """A repository has an owner and a name that the Hub takes."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo} is not a name for a repository: {one_line(error)}") from error
    if "/" not in repo:
        raise InputError(f"{repo} names no owner: a repository is user/name.")


def run(options: argparse.Namespace) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what the library warns about is refused here, in one sentence
    for repo in filter(None, (options.repo, options.code_repo)):
        check_name(repo)
    if options.repo == options.code_repo:
        raise InputError(f"{options.repo} holds its code without being told to: leave --code-repo out.")
    folder = options.folder
    config = load_config(folder)
    weights, code = weight_files(folder), code_files(folder, config)
    check_weights(folder, config)
    if config.patch_size is None:
        check_tokenizer(folder, config)
    card = make_card(options)

    files = files_to_send(folder, weights, code)
    if options.code_repo:
        code = [f"{name}.py" for name in flat_code(None)]  # a tokenizer's own code stays beside the weights
        files = [name for name in files if name not in code]
    left = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in files)
    print(f"{len(files)} files for {options.repo}: {', '.join(files)}")
    if left:
        print(f"Not sent: {', '.join(left)}")
    if options.dry_run:
        print(f"\n{card}")
        return
    write_card(card, folder)
    if not options.code_repo:
        print(send(options, options.repo, folder, files))
        return
    with tempfile.TemporaryDirectory() as codes, tempfile.TemporaryDirectory() as plain:
        print(send(options, options.code_repo, Path(codes), write_code_folder(Path(codes))))
        write_without_code(folder, files, code, options.code_repo, Path(plain))
        print(send(options, options.repo, Path(plain), files))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())

"""Write all code into folders of saved models, for servers: python -m modeling_interdomain.saving.whole runs/mine

A checkpoint carries what its configuration needs. Continuous batching, the prompt store and the other optional parts
are then there too, where the model is loaded with `trust_remote_code=True`.
"""

import argparse
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from .code import write_code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", help="what save_pretrained has written")
    found = {folder: _config(parser, folder) for folder in parser.parse_args().folder}  # before any is written
    for folder, config in found.items():
        write_code(config, folder, whole=True)


def _config(parser: argparse.ArgumentParser, folder: str) -> PreTrainedConfig:
    if not (Path(folder) / "config.json").is_file():
        parser.error(f"{folder} is not a folder with a saved model.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        parser.error(f"{folder} has a config.json that cannot be read: {error}")
    if config.model_type != "interdomain":
        parser.error(f'{folder} holds a model of type "{config.model_type}", whose code is not this.')
    return config


if __name__ == "__main__":
    main()

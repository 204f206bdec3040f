"""Write all code into folders of saved models, for servers: python -m modeling_interdomain.saving.whole runs/mine

A checkpoint carries what its configuration needs. Continuous batching, the prompt store and the other optional parts
are then there too, where the model is loaded with `trust_remote_code=True`.
"""

import argparse

from transformers import AutoConfig

from .code import write_code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", help="what save_pretrained has written")
    for folder in parser.parse_args().folder:
        write_code(AutoConfig.from_pretrained(folder), folder, whole=True)


if __name__ == "__main__":
    main()

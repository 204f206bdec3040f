"""Make an Interdomain checkpoint from another one, or check one.

python -m conversion from-llama SOURCE TARGET      a Llama whose layers see a window and keep a state of the rest
python -m conversion teach SOURCE TARGET --teacher LLAMA --data TEXTS   what the windows of a converted one leave out
python -m conversion from-mamba SOURCE TARGET      a Mamba of Transformers, the same logits
python -m conversion to-mamba SOURCE TARGET        and back
python -m conversion from-mamba2 SOURCE TARGET     a Mamba-2 of Transformers, the same logits
python -m conversion to-mamba2 SOURCE TARGET       and back
python -m conversion add-sparse SOURCE TARGET      sparse attention (HAX) beside the recurrent layers, the same logits
python -m conversion from-training SOURCE TARGET   the weights of a training run as a folder that loads anywhere
python -m conversion reduce SOURCE TARGET --state-size 16   fewer modes, refit: a smaller state, nothing trained
python -m conversion check FOLDER                  whether a folder loads, fits its configuration, and generates
"""

import argparse
import sys
from collections.abc import Sequence

from transformers.utils import logging

from conversion import (
    add_sparse,
    check,
    from_llama,
    from_mamba,
    from_mamba2,
    from_training,
    reduce,
    teach,
    to_mamba,
    to_mamba2,
)
from examples.text_data import exit_code

COMMANDS = {
    "from-llama": from_llama,
    "teach": teach,
    "from-mamba": from_mamba,
    "to-mamba": to_mamba,
    "from-mamba2": from_mamba2,
    "to-mamba2": to_mamba2,
    "add-sparse": add_sparse,
    "from-training": from_training,
    "reduce": reduce,
    "check": check,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m conversion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()  # one bar at a time, our own
    logging.set_verbosity_error()  # that parameters are new is said here, in numbers
    return exit_code(lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())

"""Performance tables.

python -m benchmarks                    those of this machine (half an hour on 2 cores without a GPU)
python -m benchmarks operator_gpu       one of them; results go to benchmarks/results/ and from there into the pages
python -m benchmarks decode_gpu --only "1.3b.*batch 1,"   some cases of a table, the others stay as they were
python -m benchmarks --quick            a smoke run that writes nothing
python -m benchmarks --readme           write the tables of the pages from the results, and nothing else
"""

import argparse
import importlib
import math
from pathlib import Path

import torch

from benchmarks import gpu, harness, readme

CPU = (
    "operator_cpu",
    "gates_cpu",
    "core_cpu",
    "ssd_cpu",
    "selective_scan_cpu",
    "sparse_cpu",
    "experts_cpu",
    "dynamic_mask_cpu",
    "model_cpu",
    "bf16_cpu",
    "decode_cpu",
    "rollback_cpu",
    "batch_cpu",
    "backends",
)
GPU = ("operator_gpu", "decode_gpu", "prefill_memory_gpu", "training_gpu")
TABLES = (
    *CPU,
    *GPU,
    "linearise_speed",
    "prompt_reuse_cpu",
    "operator_before",
    "models_before",
    "denominators",
    "overwritten",
    "capacity",
    "kernel_costs",
    "kernel_resources",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", help=f"any of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--only", help="of a GPU table, the cases that match this regular expression")
    parser.add_argument("--resume", action="store_true", help="of a GPU table, only what this GPU and commit lack")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a GPU table, the longest for one case")
    parser.add_argument(
        "--after", type=Path, help="of a GPU table, compile all and measure as soon as this file is there"
    )
    parser.add_argument("--readme", action="store_true", help="write the tables of the pages and stop")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.tables) - set(TABLES))
    if unknown:
        parser.error(f"no table named {', '.join(unknown)}; choose from {', '.join(TABLES)}")
    if arguments.readme:
        _write_pages()
        return
    choice = gpu.Choice(arguments.only, arguments.resume, arguments.seconds, arguments.after)
    for name in arguments.tables or (GPU if torch.cuda.is_available() else CPU):
        module = importlib.import_module(f"benchmarks.{name}")
        record = module.run(arguments.quick, *([choice] if name in GPU else []))
        if arguments.quick:
            record["machine"] = harness.machine()
        else:
            path = harness.write(name, record)
            record = harness.read(name)
            if hasattr(module, "plot"):
                module.plot(record, path.with_suffix(".png"))
        print(f"\n## {name}\n\n{module.table(record)}", flush=True)
    if not arguments.quick:
        _write_pages()


def _write_pages() -> None:
    readme.add_tables(GPU)
    readme.update()


if __name__ == "__main__":
    main()

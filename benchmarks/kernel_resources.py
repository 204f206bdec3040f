"""Every fused kernel compiled offline for GPUs that need not be here: registers, spills, shared memory, matrix units.

The launches themselves are recorded from real calls of the operators, so that what is compiled is what runs.
"""

import concurrent.futures
import contextlib
import importlib
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from benchmarks.chips import CHIPS, blocks_a_multiprocessor
from benchmarks.harness import footnote, markdown
from modeling_interdomain.ops.common import launch

MODULES = (
    *(f"ops.interdomain.triton{part}" for part in ("", "_gates", "_delta", "_step", "_prepare", "_scan")),
    "ops.diagonal.triton_tables",
    *(f"ops.{name}.triton{part}" for name in ("ssd", "s4d", "selective_scan") for part in ("", "_step")),
    "ops.experts.triton",
    *(f"ops.sparse.triton{part}" for part in ("", "_step")),
)
# Bytes of shared memory a block may use on each target, from the makers' manuals.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
MATRIX = {
    "cuda": {"wgmma": r"wgmma\.mma_async", "mma": r"mma\.sync", "tcgen05": r"tcgen05\.mma"},
    "hip": {"mfma": r"v_mfma_"},
}


class Launch(NamedTuple):
    kernel: triton.runtime.JITFunction
    arguments: dict
    warps: tuple[int, ...]  # those that may run


class _Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel, launches: list[Launch]):
        tuned = isinstance(kernel, triton.runtime.Autotuner)
        self.kernel, self.launches = kernel.fn if tuned else kernel, launches
        self.defaults = {x.name: x.default for x in self.kernel.params if x.has_default}
        self.choices: dict[tuple, set[int]] = {}  # the warps that may run, by the arguments that say which tiles
        for config in kernel.configs if tuned else [triton.Config({}, num_warps=4)]:
            self.choices.setdefault(tuple(config.kwargs.items()), set()).add(config.num_warps)

    def __getitem__(self, grid):
        def launch(*args, num_warps=None, **kwargs):
            arguments = self.defaults | dict(zip(self.kernel.arg_names, args)) | kwargs
            for tiles, tried in self.choices.items():
                warps = (num_warps,) if num_warps else tuple(sorted(tried))
                self.launches.append(Launch(self.kernel, arguments | dict(tiles), warps))

        return launch


@contextlib.contextmanager
def recorded():
    """All kernels of the package replaced; yields the list of their launches."""
    launches, originals = [], []
    for module_name in MODULES:
        module = importlib.import_module(f"modeling_interdomain.{module_name}")
        for name, kernel in list(vars(module).items()):
            if name.startswith("_") and isinstance(kernel, (triton.runtime.JITFunction, triton.runtime.Autotuner)):
                originals.append((module, name, kernel))
                setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


# Steps of states one after the other, and of states in slots of a pool.
_SLOTS = None, torch.zeros(2, dtype=torch.int32)


def _ssd(dtype: torch.dtype, heads: int, groups: int, width: int, size: int) -> list[Launch]:
    from modeling_interdomain.ops.ssd.triton import triton_ssd
    from modeling_interdomain.ops.ssd.triton_step import triton_ssd_step

    keys, inputs = (2, 256, groups, size), (2, 256, heads, width)
    query, key, value = (torch.zeros(x, dtype=dtype, requires_grad=True) for x in (keys, keys, inputs))
    decay = torch.zeros(inputs[:3], requires_grad=True)
    with recorded() as launches:
        output, state = triton_ssd(query, key, value, decay, None, None, None, 64, True)
        (output.sum() + state.sum()).backward()
        with torch.no_grad():
            for slots in _SLOTS:
                triton_ssd_step(*(x[:, 0] for x in (query, key, value, decay)), state, None, slots)
    return launches


def _selective_scan(dtype: torch.dtype, channels: int, size: int) -> list[Launch]:
    from modeling_interdomain.ops.selective_scan.triton import triton_scan
    from modeling_interdomain.ops.selective_scan.triton_step import triton_scan_step

    query, key = (torch.zeros(2, 256, size, dtype=dtype, requires_grad=True) for _ in range(2))
    value = torch.zeros(2, 256, channels, dtype=dtype, requires_grad=True)
    step, rate = torch.zeros(2, 256, channels, requires_grad=True), torch.zeros(size, channels, requires_grad=True)
    with recorded() as launches:
        output, state = triton_scan(query, key, value, step, rate, None, None, None, True)
        (output.sum() + state.sum()).backward()
        with torch.no_grad():
            for slots in _SLOTS:
                triton_scan_step(*(x[:, 0] for x in (query, key, value, step)), rate, state, None, None, slots)
    return launches


def _s4d(dtype: torch.dtype, heads: int, groups: int, width: int, size: int) -> list[Launch]:
    from modeling_interdomain.ops.s4d.entry import s4d_tables
    from modeling_interdomain.ops.s4d.triton import triton_s4d
    from modeling_interdomain.ops.s4d.triton_step import triton_s4d_step

    inputs = torch.zeros(2, 256, groups, width, dtype=dtype, requires_grad=True)
    parameters = [torch.zeros(n, size, 2, requires_grad=True) for n in (groups, groups, heads)]
    with recorded() as launches:
        output, state = triton_s4d(inputs, *parameters, None, None, None, 64, True)
        (output.sum() + state.sum()).backward()
        with torch.no_grad():
            moves = s4d_tables(*parameters, torch.float32)
            tables = moves.decay, moves.turn, moves.beta, *moves.matrices
            for slots in _SLOTS:
                triton_s4d_step(inputs[:, 0], *tables, state, None, slots)
    return launches


def _interdomain(
    dtype: torch.dtype, heads: int, groups: int, feature_dim: int, value_dim: int, size: int, coefficients: str
) -> list[Launch]:
    """Preparation of the inputs, operator, their gradients, and a decoding step."""
    from modeling_interdomain.ops.interdomain.triton import triton_attention
    from modeling_interdomain.ops.interdomain.triton_prepare import triton_prepare
    from modeling_interdomain.ops.interdomain.triton_scan import triton_scan_attention
    from modeling_interdomain.ops.interdomain.triton_step import triton_step

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    projected = [zeros(2, 256, n, dtype=dtype) for n in (heads * feature_dim, groups * feature_dim, groups * value_dim)]
    taps = zeros(heads * feature_dim, 4), zeros(groups * feature_dim, 4)
    norms = zeros(feature_dim), zeros(value_dim), zeros(groups, feature_dim), zeros(groups, value_dim)
    shape = {"full": (groups, size, size, 2), "diagonal": (groups, size, 2)}[coefficients]
    with recorded() as launches:
        parameters = [zeros(groups, size, 2), zeros(groups, size, 2), zeros(*shape)]
        tokens, _ = triton_prepare(
            *projected, taps, norms, None, None, None, None, heads, groups, None, 1e-6, False
        )  # fmt: skip
        output, state = triton_attention(*tokens, *parameters, "bilinear", None, None, 64)
        output.sum().backward()
        wide = [x.detach().float().requires_grad_() for x in (*tokens, *parameters)]
        triton_scan_attention(*wide, "bilinear", None, [0, 256], 64)[0].sum().backward()
        with torch.no_grad():
            for slots in _SLOTS:
                triton_step(*(x[:, 0] for x in tokens), *parameters, state, "bilinear", None, False, slots)
    return launches


def _gated(dtype: torch.dtype, heads: int, groups: int, width: int, size: int, delta: bool) -> list[Launch]:
    """The operator with gates, its gradients, and a decoding step that has the delta rule as well."""
    from modeling_interdomain.ops.interdomain.gates import Gates
    from modeling_interdomain.ops.interdomain.triton_delta import delta_triton_attention
    from modeling_interdomain.ops.interdomain.triton_gates import gated_triton_attention
    from modeling_interdomain.ops.interdomain.triton_step import triton_step

    run = delta_triton_attention if delta else gated_triton_attention
    tokens = [torch.zeros(2, 256, n, width, dtype=dtype, requires_grad=True) for n in (heads, groups, groups)]
    parameters = [torch.zeros(groups, size, *more, 2, requires_grad=True) for more in ((), (), (size,))]
    gate = torch.zeros(2, 256, groups, requires_grad=True)
    with recorded() as launches:
        output, state = run(
            *tokens, *parameters, "hermitian", None, None, 64, gates=Gates(gate, gate, gate if delta else None)
        )
        output.sum().backward()
        with torch.no_grad():
            for slots in _SLOTS:
                now, gates = (x[:, 0] for x in tokens), (gate[:, 0],) * 3
                triton_step(*now, *parameters, state, "hermitian", None, False, slots, *gates)
    return launches


def _experts(dtype: torch.dtype, width: int, count: int) -> list[Launch]:
    from modeling_interdomain.ops.experts.triton import triton_bags, triton_products

    x, table = (torch.zeros(n, width, dtype=dtype) for n in (8, 64))
    ids = torch.zeros(8, count, dtype=torch.long)
    with recorded() as launches:
        weights = triton_products(x, table, ids)
        triton_bags(weights, table, ids)
        triton_bags(weights.flatten(), x, ids.flatten(), torch.zeros(65, dtype=torch.long))
    return launches


def _sparse(dtype: torch.dtype, keys: int, key_width: int, value_width: int) -> list[Launch]:
    """The best keys, the latest of sixteen bins, and a window that leaves out what is in these."""
    from modeling_interdomain.ops.sparse.stream import Bins, stream_of
    from modeling_interdomain.ops.sparse.triton import triton_sparse

    shape = 2, 256, 4
    tokens = (torch.zeros(*shape, n, dtype=dtype, requires_grad=True) for n in (key_width, key_width, value_width))
    one = torch.zeros(shape, dtype=torch.long)
    bins = Bins(one, one, 16, keys), Bins(one, one, 1, keys)
    with recorded() as launches:
        triton_sparse(stream_of(*tokens, torch.zeros(shape), keys, bins, None, None, None)).sum().backward()
    return launches


def _sparse_step(dtype: torch.dtype, keys: int, key_width: int, value_width: int) -> list[Launch]:
    from modeling_interdomain.ops.sparse.stream import Bins, empty_memory
    from modeling_interdomain.ops.sparse.triton_step import triton_sparse_step

    query, entry = (torch.zeros(8, n, dtype=dtype) for n in (key_width, key_width + value_width))
    memory = empty_memory(2, 4, key_width, value_width, keys, [(16, keys)], torch.zeros(1))
    own = torch.zeros(2, 4, dtype=torch.long)
    with recorded() as launches:
        triton_sparse_step(query, entry, memory, torch.zeros(2, 4), (Bins(own, own, 16, keys),), None)
    return launches


_16, _32 = torch.bfloat16, torch.float32
# name: what launches it, and with which dtype, heads, groups and sizes
PROBLEMS: dict[str, tuple[Callable[..., list[Launch]], tuple]] = {
    "1.3B head, bf16": (_interdomain, (_16, 4, 4, 64, 64, 64, "full")),
    "1.3B head, fp32": (_interdomain, (_32, 4, 4, 64, 64, 64, "full")),
    "M = R = D = 128, bf16": (_interdomain, (_16, 4, 4, 128, 128, 128, "full")),
    "M = R = D = 256, bf16": (_interdomain, (_16, 4, 1, 256, 256, 256, "full")),
    "M = 96, R = 80, D = 65, bf16": (_interdomain, (_16, 4, 2, 80, 65, 96, "diagonal")),
    "gates, 1.3B head, bf16": (_gated, (_16, 4, 4, 64, 64, False)),
    "delta rule, 1.3B head, bf16": (_gated, (_16, 4, 4, 64, 64, True)),
    "delta rule, 1.3B head, fp32": (_gated, (_32, 4, 4, 64, 64, True)),
    "SSD, P = 64, N = 128, bf16": (_ssd, (_16, 8, 1, 64, 128)),
    "SSD, P = 64, N = 128, fp32": (_ssd, (_32, 8, 1, 64, 128)),
    "SSD, P = N = 256, bf16": (_ssd, (_16, 4, 2, 256, 256)),
    "S4D, 1.3B head, bf16": (_s4d, (_16, 4, 4, 128, 64)),
    "selective scan, N = 16, bf16": (_selective_scan, (_16, 256, 16)),
    "experts, bf16": (_experts, (_16, 2048, 16)),
    "sparse, 64 keys, D = 128, bf16": (_sparse, (_16, 64, 16, 128)),
    "sparse, 64 keys, D = 128, fp32": (_sparse, (_32, 64, 16, 128)),
    "sparse, d = D = 256, bf16": (_sparse, (_16, 64, 256, 256)),
    "sparse step, 64 keys, bf16": (_sparse_step, (_16, 64, 16, 64)),
}


def launches_of(problem: str) -> list[Launch]:
    """What one problem launches, forward, backward and in a decoding step."""
    start, sizes = PROBLEMS[problem]
    return start(*sizes)


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def source(kernel, arguments: dict) -> ASTSource:
    """The kernel as a launch with these arguments would specialise it."""
    signature, constants, attributes = {}, {}, {}

    def specialise(value, path: tuple[int, ...], constant: bool, specialised: bool):
        """The type of an argument, or those of a bundle; constants and attributes are kept by their paths."""
        if constant or value is None:
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):  # Triton specialises the members of a bundle whatever is said of the bundle
            members = [specialise(x, (*path, i), False, True) for i, x in enumerate(value)]
            return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if specialised and value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i1" if isinstance(value, bool) else "i32"

    for index, parameter in enumerate(kernel.params):
        signature[parameter.name] = specialise(
            arguments[parameter.name], (index,), parameter.is_constexpr, not parameter.do_not_specialize
        )
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def parse_all(target_name: str = "sm_90") -> int:
    """Let the compiler's front end read every launch of every problem, which takes seconds; how many there are.

    The interpreter runs kernels as Python and does not see what a version of Triton cannot read.
    """
    target, _ = TARGETS[target_name]
    backend, found = make_backend(target), 0
    for problem in PROBLEMS:
        for index, warps in _distinct(problem):
            kernel, arguments, _ = launches_of(problem)[index]
            tree = source(kernel, arguments)
            options = backend.parse_options({"num_warps": warps[-1], **tree.parse_options()})
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            tree.make_ir(
                target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            )
            found += 1
    return found


def compiled(problem: str, index: int, target_name: str, warps: int, stages: int) -> dict:
    """Compile one recorded launch; what the assembler says of it."""
    kernel, arguments, _ = launches_of(problem)[index]
    target, limit = TARGETS[target_name]
    if target_name == "sm_90":
        launch._no_sound_assembler()  # takes the assembler that a launch would take
    if target.backend == "hip" and "MATH" in arguments:
        arguments = arguments | {"MATH": arguments["MATH"]._replace(PRECISION="ieee")}
    row = {"problem": problem, "kernel": kernel.__name__, "target": target_name, "warps": warps, "stages": stages}
    for name in ("SKEWED", "REVERSE", "STRICT"):
        if arguments.get(name):
            row["kernel"] += f", {name.lower()}"
    for name in ("slots", "readers"):
        if arguments.get(name) is not None and name not in row["kernel"]:  # "of_slots" says it already
            row["kernel"] += f", {name}"
    if "EDGE" in arguments and arguments["SIZES"].FEW and not arguments["SKEWED"]:
        row["kernel"] += f", tiles of {arguments['EDGE']}"
    built = triton.compile(source(kernel, arguments), target=target, options={"num_warps": warps, "num_stages": stages})
    row["shared_bytes"] = built.metadata.shared
    row["fits"] = built.metadata.shared <= limit
    text = built.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    row["matrix"] = {name: len(re.findall(p, text)) for name, p in MATRIX[target.backend].items()}
    row |= _nvidia(built.asm["cubin"], text) if target.backend == "cuda" else _amd(text)
    return row


def _nvidia(cubin: bytes, ptx: str) -> dict:
    """Of the binary. What the program itself keeps in local memory is no spill: sines in float64 have an array there,
    for angles beyond 2^30.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\d+)", said.stdout).group(1))
    stores, own = len(re.findall(r"\bSTL\b|\bSTL\.", code)), len(re.findall(r"\bst\.local\b", ptx))
    return {"registers": registers, "spills": max(0, stores - own), "mixed_up": mixed_up_descriptors(code)}


def mixed_up_descriptors(code: str) -> int:
    """Matrix products of Hopper whose operand is looked for at an address made of a kernel's argument: ptxas 12.8 takes
    a uniform register for what it no longer holds.

    Args:
        code: what `cuobjdump -sass` prints. It is read from top to bottom, twice, for what a loop carries.
    """
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", code, re.MULTILINE)
    of_arguments: set[int] = set()
    found: set[int] = set()
    for _ in range(2):
        for number, line in enumerate(lines):
            name, _, rest = line.partition(" ")
            if name.startswith("HGMMA"):
                first = int(re.search(r"gdesc\[UR(\d+)\]", line).group(1))
                # Where the first operand is in registers, only the second pair is read.
                used = range(first + (2 if re.match(r"R\d+\S*, R\d+\S*, gdesc", rest) else 0), first + 4)
                if of_arguments.intersection(used):
                    found.add(number)
                continue
            target = re.match(r"UR(\d+),", rest)
            if target is None or not name.startswith(("U", "S2UR", "R2UR")):
                continue
            width = 2 if ".64" in name or "WIDE" in name else 1
            written = range(int(target.group(1)), int(target.group(1)) + width)
            sources = rest[target.end() :]
            read = {int(x) + i for x in re.findall(r"\bUR(\d+)", sources) for i in range(width)}
            # In bank 0, arguments begin at 0x210; what lies before says how the kernel was launched.
            argument = any(int(x, 16) >= 0x210 for x in re.findall(r"c\[0x0\]\[(0x[0-9a-f]+)\]", sources))
            tells = not name.startswith("R2UR") and bool(argument or of_arguments & read)
            of_arguments = of_arguments.union(written) if tells else of_arguments.difference(written)
    return len(found)


def _amd(text: str) -> dict:
    find = {"registers": r"\.vgpr_count:\s*(\d+)", "spills": r"\.vgpr_spill_count:\s*(\d+)"}
    return {name: int(re.search(pattern, text).group(1)) for name, pattern in find.items()}


def run(quick: bool = False) -> dict:
    if triton.knobs.runtime.interpret:
        raise SystemExit("Kernels cannot be compiled while TRITON_INTERPRET is set: unset it.")
    jobs = small_jobs() if quick else all_jobs()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        rows = list(pool.map(_job, jobs))
        rows += pool.map(_job, [] if quick else other_warps(jobs, rows))
    return {"rows": rows, "triton": version("triton")}


def all_jobs() -> list[tuple]:
    """The first problem for every target with all numbers of warps; the others for two with the largest."""
    first = next(iter(PROBLEMS))
    return [
        (problem, index, target, warps, 1)
        for problem in PROBLEMS
        for index, warps_of_launch in _distinct(problem)
        for target in (TARGETS if problem == first else ("sm_90", "sm_100"))
        for warps in (warps_of_launch if problem == first else warps_of_launch[-1:])
    ]


def other_warps(jobs: list[tuple], rows: list[dict]) -> list[tuple]:
    """The same with the other numbers of warps where registers were spilled: they too may run."""
    spilled = [job for job, row in zip(jobs, rows) if row["spills"]]
    others = ((*job[:3], warps, job[4]) for job in spilled for warps in launches_of(job[0])[job[1]].warps)
    return [job for job in others if job not in jobs]


def small_jobs() -> list[tuple]:
    """The kernels of a forward and the sequential scan for one target."""
    return some_jobs(next(iter(PROBLEMS)), ("chunk_states", "attend", "walk", "walk_back"), warps=4)


def some_jobs(problem: str, kernels: Sequence[str], warps: int) -> list[tuple]:
    """These kernels of a problem, each at its first launch, for one target."""
    names = [launch.kernel.__name__ for launch in launches_of(problem)]
    return [(problem, names.index(name), "sm_90", warps, 1) for name in kernels]


def _job(job) -> dict:
    return compiled(*job)


def _distinct(problem: str) -> list[tuple[int, tuple[int, ...]]]:
    """The launches that differ, and their warps: two with the same kind of arguments are compiled once."""
    seen, chosen = set(), []
    for index, (kernel, arguments, warps) in enumerate(launches_of(problem)):
        key = source(kernel, arguments).hash()
        if key not in seen:
            seen.add(key)
            chosen.append((index, warps))
    return chosen


def short_table(record: dict) -> str:
    """The first problem alone, for benchmarks/results/gpu.md."""
    first = next(iter(PROBLEMS))
    rows = [row for row in record["rows"] if row["problem"] == first]
    others = dict.fromkeys(f"`{row['problem']}`" for row in record["rows"] if row["problem"] != first)
    more = f"\n\n`benchmarks/results/kernel_resources.json` has the same for {', '.join(others)}." if others else ""
    return table({**record, "rows": rows}) + more


def table(record: dict) -> str:
    """One row a problem and kernel, one column a target; of the numbers of warps the one that spills least."""
    best: dict[tuple, dict] = {}
    for row in record["rows"]:
        key = row["problem"], row["kernel"], row["target"]
        if key not in best or _rank(row) < _rank(best[key]):
            best[key] = row
    lines = dict.fromkeys((problem, kernel) for problem, kernel, _ in best)
    body = [
        [problem, f"`{kernel}`", *(_cell(best.get((problem, kernel, target))) for target in TARGETS)]
        for problem, kernel in lines
    ]
    note = (
        "Registers a thread, spilled ones after a plus sign; shared memory; warps; blocks that a multiprocessor holds; "
        "matrix instructions found."
    )
    return f"{markdown(['problem', 'kernel', *TARGETS], body)}\n\n{note} Triton {record['triton']}. {footnote(record)}"


def _rank(row: dict) -> tuple:
    return not row["fits"], row["spills"], row["warps"]


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    spills = f"+{row['spills']}" if row["spills"] else ""
    matrix = ", ".join(f"{count} {name}" for name, count in row["matrix"].items() if count) or "no matrix"
    fits = "" if row["fits"] else " (too much)"
    blocks = blocks_a_multiprocessor(row, CHIPS[row["target"]])
    return f"{row['registers']}{spills}; {row['shared_bytes'] / 1024:.0f} KiB{fits}; {row['warps']}; {blocks}; {matrix}"

"""Put sparse attention (HAX) beside the recurrent layers of a checkpoint; its logits stay as they are until training.

Any model of this architecture can be the source, those of `from-mamba` and `from-mamba2` too. The gates of the
branches start at 0, so that nothing changes at first; the gates learn from the first step on, and with them the rest.

As in the paper (HAX, arXiv 2507.00449) queries and keys of a branch start as those of the layer beside it, C and B,
where shapes allow:

- "ssd" layers (Mamba-2): where the branch has as many heads as there are groups of B and C, of the same size, and
  convolutions of the same length, it starts with their projections and convolutions. The activation after them is
  left out.
- "selective_scan" layers (Mamba): B and C are linear in x, which is past a convolution and SiLU, and a branch reads
  what comes before. With one head of their size it starts with the nearest linear map followed by a convolution, for
  small inputs, where SiLU is half its input.
- All others start as in a new model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedConfig, set_seed

from conversion.from_llama import source_folder
from conversion.from_training import class_of, expected_weights, fitting
from conversion.reading import made_config, read_config, read_weights, weight_files
from conversion.writing import add_folders, check_target, finish, may_write, saved_dtype
from examples.text_data import InputError, check_seed
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.mixers.selective_scan.mixer import SelectiveScanMixer
from modeling_interdomain.mixers.ssd.mixer import SSDMixer
from modeling_interdomain.registry import TOKEN_MIXERS

# Fields of the configuration that can be asked for, and what they are.
NUMBERS = {
    "sparse_keys": "keys that a query sees (default: 64)",
    "sparse_num_heads": "heads of a branch (default: the groups of B and C in Mambas, else those of the values)",
    "sparse_key_dim": "width of queries and keys (default: that of B and C in Mambas, else 16)",
    "sparse_hash_size": "bins of argmax, or bits of sign (default: 64)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sparse-attention",
        default="hax",
        help='"hax", or of lsh, key_selection, sliding_window, sink, dilated, full some joined by "+" (default: hax)',
    )
    for name, words in NUMBERS.items():
        parser.add_argument(_option(name), type=int, help=words)
    parser.add_argument("--sparse-hash", choices=("argmax", "sign"), help="default: argmax")
    parser.add_argument("--ranking-loss-coef", type=float, help="of the loss of key selection (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of new weights (default: %(default)s)")
    add_folders(parser, "folder of the model, or its name on the Hub")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(options: argparse.Namespace) -> None:
    check_seed(options.seed)
    check_target(options)
    folder = source_folder(options.source)
    source = read_config(folder)
    check_style(source, folder)
    config = with_branches(source, options)
    weights, _ = fitting(source, read_weights(weight_files(folder)), folder)
    dtype = saved_dtype(options, weights)
    expected = expected_weights(config)
    kept = sum(x.numel() for x in weights.values())
    new = sum(x.numel() for name, x in expected.items() if ".sparse." in name)
    layers = [i for i, name in enumerate(config.sparse_per_layer) if name is not None]
    about = f"{options.sparse_attention} beside layers {', '.join(map(str, layers))}\n"
    if not may_write(options, expected, dtype, f"{about}{kept:,} parameters carried over, {new:,} new"):
        return
    set_seed(options.seed)
    model = class_of(config).from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
    started = [i for i in layers if start_branch(model.base_model.layers[i].token_mixer)]
    report = {"source": options.source, "layers": layers, "started_from_b_and_c": started, "new_parameters": new}
    finish(model, [folder], options.target, report)


def check_style(source: PreTrainedConfig, folder: Path) -> None:
    """Refuse what has no place for a branch, or has one already."""
    if not isinstance(source, InterdomainConfig):
        how = {"mamba": ": convert it with from-mamba first", "mamba2": ": convert it with from-mamba2 first"}
        raise InputError(f"{folder} is a {source.model_type} model, not one of ours{how.get(source.model_type, '')}.")
    if getattr(source, "quantization_config", None):
        raise InputError("The source is quantized: add branches to the original weights.")
    if any(source.sparse_per_layer):
        raise InputError(f"The source has sparse_attention = {source.sparse_attention!r} already.")
    if not any(TOKEN_MIXERS[name].can_branch for name in source.mixers_per_layer):
        names = ", ".join(dict.fromkeys(source.mixers_per_layer))
        raise InputError(f"The source has no recurrent layers, which a branch stands beside: its layers are {names}.")


def with_branches(source: InterdomainConfig, options: argparse.Namespace) -> InterdomainConfig:
    """The configuration with a branch beside each recurrent layer."""
    asked = {name: getattr(options, name) for name in (*NUMBERS, "sparse_hash", "ranking_loss_coef")}
    fields: dict = of_b_and_c(source) | {name: value for name, value in asked.items() if value is not None}
    kernel = fields.get("conv_kernel", source.conv_kernel)
    fields |= {"sparse_gate_init": 0.0, "sparse_query_init": "induction" if kernel > 1 else "independent"}
    fields["sparse_attention"] = [
        options.sparse_attention if TOKEN_MIXERS[name].can_branch else None for name in source.mixers_per_layer
    ]
    saved = {name: value for name, value in source.to_dict().items() if name not in ("layer_types", "model_type")}
    return made_config(saved | fields, "Such a branch cannot be")


def of_b_and_c(source: InterdomainConfig) -> dict[str, int]:
    """The shape of a branch that can start with B and C, where all recurrent layers of the source have them."""
    recurrent = {name for name in source.mixers_per_layer if TOKEN_MIXERS[name].can_branch}
    if recurrent == {"ssd"}:
        shape = {"sparse_num_heads": source.ssd_groups, "sparse_key_dim": source.ssd_state_size}
        return shape | {"conv_kernel": source.ssd_conv_kernel}  # which "ssd" layers do not heed
    if recurrent == {"selective_scan"}:
        return {"sparse_num_heads": 1, "sparse_key_dim": source.scan_state_size}
    return {}


@torch.no_grad()
def start_branch(mixer: torch.nn.Module) -> bool:
    """Let queries and keys of a branch start with C and B of its layer; whether shapes allow it."""
    if isinstance(mixer, SSDMixer):
        heads, starts = mixer.q_proj.out_features // mixer.size, _of_ssd(mixer)
    elif isinstance(mixer, SelectiveScanMixer):
        heads, starts = 1, _of_selective_scan(mixer)
    else:
        return False
    branch = mixer.sparse
    own = [getattr(branch, f"{stream}_{kind}").weight for stream in "qk" for kind in ("proj", "conv")]
    if branch.heads != heads or [x.shape for x in own] != [x.shape for x in starts]:
        return False
    for parameter, start in zip(own, starts, strict=True):
        parameter.copy_(start)
    return True


def _of_ssd(mixer: SSDMixer) -> list[torch.Tensor]:
    """Projection and convolution, `[W, hidden]` and `[W, 1, kernel]`, of C and then of B."""
    found = []
    for stream in "qk":
        weight = getattr(mixer, f"{stream}_proj").weight
        conv = getattr(mixer, f"{stream}_conv", None)
        found += [weight, weight.new_ones(len(weight), 1, 1) if conv is None else conv.weight]
    return found


def _of_selective_scan(mixer: SelectiveScanMixer) -> list[torch.Tensor]:
    """The same, as near as it comes: a row of C is `sum_s M[s] h_{t - s}`; of rank 1 the best M are taps of one map."""
    inner, taps = mixer.v_proj.weight.double(), mixer.v_conv.weight[:, 0].double()
    _, b, c = mixer.x_proj.weight.double().split(mixer.sizes)
    found = []
    for rows in (c, b):
        maps = (rows[:, None] * taps.T) @ inner / 2  # [N, kernel, hidden], where SiLU is half its input
        left, size, right = torch.linalg.svd(maps, full_matrices=False)
        found += [size[:, :1] * right[:, 0], left[:, None, :, 0]]
    return found

"""What vLLM asks before it starts: whether a checkpoint and the options of the engine can be served."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from modeling_interdomain import InterdomainForCausalLM
from modeling_interdomain.layers.rotary import LENGTH_DEPENDENT
from modeling_interdomain.saving.checkpoint_folder import damaged_weights

MIXERS = ("interdomain", "s4d", "ssd", "selective_scan", "window", "softmax")
QUANTIZED = ("compressed-tensors",)
_NUMBERS = ("F64", "F32", "F16", "BF16")  # dtypes of safetensors that a weight has as it is
Headers = dict[str, tuple[str, list[int]]]  # dtype and shape of tensors by name
FEED_FORWARDS = ("mlp", "cdmoe", "none")


class ServedConfig(VerifyAndUpdateConfig):
    """The hooks of vLLM for this architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing is compiled or captured: vLLM would trace a model once, in a forward without a cache, and answers
        were wrong, since layers go other ways where there is one."""
        model_config.enforce_eager = True

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise a ValueError, one sentence, where a model cannot be served.

        In the process of the user, before an engine is started.
        """
        config, options = vllm_config.model_config.hf_config, vllm_config.parallel_config
        reason = (
            why_not_served(config)
            or _why_not_shared(config, options.tensor_parallel_size)
            or _why_no_such_engine(vllm_config)
        )
        if reason is not None:
            raise ValueError(f"vllm_interdomain does not serve {vllm_config.model_config.model}: {reason}.")
        check_weights(vllm_config.model_config.model, config, vllm_config.load_config.load_format)


def why_not_served(config) -> str | None:
    """The part of a model that has no place in vLLM, or None."""
    if getattr(config, "model_type", None) != "interdomain":
        return f'its model_type is {getattr(config, "model_type", None)!r}, and this plugin knows "interdomain" alone'
    for field, names, known in (
        ("token_mixers", config.mixers_per_layer, MIXERS),
        ("feed_forwards", config.feed_forwards_per_layer, FEED_FORWARDS),
    ):
        if others := sorted(set(names) - set(known)):
            return f"its {field} name {', '.join(others)}, and it serves {', '.join(known)}"
    if any(branch is not None for branch in config.sparse_per_layer):
        return "its sparse_attention keeps a memory of its own, for which a page of vLLM's cache has no place"
    if config.gates == "warp":
        return 'gates = "warp" is a control for studies, without the steps on slots that vLLM takes'
    if config.learned_state:
        return "learned_state begins each text with a state, and vLLM's cache begins with zeros"
    if config.dynamic_mask is not None:
        return "dynamic_mask weighs keys as vLLM's attention does not"
    if config.bidirectional:
        return "a bidirectional model generates nothing"
    if (config.rope_parameters or {}).get("rope_type") in LENGTH_DEPENDENT:
        return f"rope_type {config.rope_parameters['rope_type']!r} turns keys again when a text grows"
    return None


def _why_not_shared(config, processes: int) -> str | None:
    reason = config.why_not_shardable(processes)
    if reason is None or processes == 1:
        return None
    return f"tensor_parallel_size = {processes} cannot share out its heads, because {reason}"


def _why_no_such_engine(vllm_config: Any) -> str | None:
    if vllm_config.speculative_config is not None:
        return "no state is taken back in vLLM's cache, so leave speculative_config out"
    model_config, config = vllm_config.model_config, vllm_config.model_config.hf_config
    quantized = model_config.quantization
    if quantized not in (None, *QUANTIZED):
        return (
            f'weights quantized by "{quantized}" have not been seen to work in it, by {", ".join(QUANTIZED)} they have'
        )
    if current_platform.is_cpu() and model_config.dtype == torch.float32 and _multiplied_in_bfloat16(config):
        return 'vLLM multiplies such quantized weights on this CPU in bfloat16 alone, so set dtype = "bfloat16"'
    sizes = _head_sizes() if "softmax" in config.mixers_per_layer else None
    if sizes is not None and config.head_dim not in sizes:
        known = ", ".join(map(str, sizes))
        return f"vLLM's softmax attention on a CPU has heads of {known} numbers, and head_dim is {config.head_dim}"
    if vllm_config.lora_config is not None and "selective_scan" in config.mixers_per_layer:
        return "selective_scan layers have maps of a part of a batch, and its LoRA adapts all, so leave enable_lora out"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "its layers are not shared out, so leave pipeline_parallel_size at 1"
    if model_config.runner_type != "generate":
        kind = ", ".join(config.architectures)
        return f"it generates text, and {kind} with runner {model_config.runner_type!r} does not"
    return None


def _multiplied_in_bfloat16(config) -> bool:
    """Whether vLLM's kernels for CPUs do not take the inputs of quantized maps in float32."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return False
    groups = [quantized, *quantized.get("config_groups", {}).values()]
    packed = any(group.get("format") == "pack-quantized" for group in groups)  # 4 bits
    return packed or torch.cpu._is_amx_tile_supported()


def _head_sizes() -> list[int] | None:
    """Those that vLLM's attention has on a CPU; None elsewhere."""
    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend.get_supported_head_sizes()


def check_weights(folder: str, config, load_format: str) -> None:
    """Raise a ValueError where the safetensors files of a folder are not those of the configuration.

    Only their headers are read. What is no folder its loader looks at.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files or load_format not in ("auto", "safetensors"):
        return
    if damaged := damaged_weights(folder):
        raise ValueError(f"{folder} has {', '.join(damaged)} that cannot be read: copy or download again.")
    found = _headers(files)
    with torch.device("meta"):
        model = InterdomainForCausalLM(config)
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    known = {*wanted, *(model._tied_weights_keys if config.tie_word_embeddings else ())}
    if getattr(config, "quantization_config", None):
        found = _decoded(found, model)
    problems = [f"lacks {name}" for name in wanted if name not in found]
    for name in (name for name in wanted if name in found):
        dtype, shape = found[name]
        if dtype not in _NUMBERS:
            problems.append(f"has {name} in {dtype} and no scale for it")
        if shape != wanted[name]:
            problems.append(f"has {name} of shape {shape} instead of {wanted[name]}")
    problems += [f"has {name}, which no part of the model reads" for name in found if name not in known]
    if problems:
        more = f" and {len(problems) - 1} more such" if len(problems) > 1 else ""
        raise ValueError(f"The weights in {folder} are not those of its config.json: it {problems[0]}{more}.")


def _headers(files: list[Path]) -> Headers:
    """What files of safetensors say of their tensors, each of which one file alone may hold."""
    found: Headers = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in found:
                    raise ValueError(f"{file.parent} has {name} in {file.name} and in another file: keep one.")
                part = tensors.get_slice(name)
                found[name] = part.get_dtype(), part.get_shape()
    return found


def _decoded(found: Headers, model: nn.Module) -> Headers:
    """With a weight in place of all tensors that stand for that of a linear map; their shapes their loader knows."""
    decoded, parts = dict(found), defaultdict(set)
    for name in found:
        parts[name.rpartition(".")[0]].add(name)
    for name, part in model.named_modules():
        weight, scale, packed = (f"{name}.{kind}" for kind in ("weight", "weight_scale", "weight_packed"))
        coded = packed in found or (weight in found and found[weight][0] not in _NUMBERS)
        if isinstance(part, nn.Linear) and scale in found and coded:
            for each in parts[name] - {f"{name}.bias"}:
                del decoded[each]
            decoded[weight] = _NUMBERS[0], list(part.weight.shape)
    return decoded

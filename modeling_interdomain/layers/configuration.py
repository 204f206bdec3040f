"""The fields of a configuration that belong to no family of layers, and what the families' fields are built on.

A family declares its fields beside its layers, as a dataclass on top of `ModelFields`; `InterdomainConfig` joins them
by inheritance, so that a file of a configuration stays flat. None of these modules imports PyTorch.
"""

from dataclasses import dataclass
from typing import ClassVar

# Kinds of rotary embeddings whose frequencies change with the length: what a state holds cannot be rotated again.
LENGTH_DEPENDENT: tuple[str, ...] = ("dynamic", "longrope")
# Our styles of tensor parallelism, which `parallel/tensor.py` registers.
HEADS: str = "interdomain_heads"
LAYERS: str = "interdomain_layers"


@dataclass(kw_only=True, repr=False)
class ModelFields:
    """Fields of the whole model. The library and `InterdomainConfig` make them a configuration.

    Args:
        vocab_size: number of tokens. Default: 32000.
        hidden_size: width of the residual stream, d. Default: 768.
        intermediate_size: width of the SwiGLU layer. Default: None, 8 d / 3 rounded up to a multiple of 128.
        num_hidden_layers: number of layers, N. Default: 12.
        num_attention_heads: query heads, H. Default: 12.
        num_key_value_heads: key/value groups, G, a divisor of H. Default: None, as many as query heads.
        head_dim: value dimension of a head, D. Default: None, `hidden_size / num_attention_heads`.
        conv_kernel: tokens of the causal convolutions of queries and keys ("selective_scan": of its input). Default: 4.
        token_mixers: "interdomain", "s4d" (the same state read by a learned vector, no query), "ssd" (state space
            duality, whose fields begin with ssd; Mamba-2 is a case of it), "selective_scan" (the layer of Mamba, whose
            fields begin with scan), "softmax" or "inner_function" (softmax attention whose values are the input times a
            learned vector that each token chooses, from "Wonderful Matrices") or "window" (softmax of the last tokens,
            a state of the others) for all layers, or a list with one name a layer. Default: "interdomain".
        feed_forwards: "mlp" (SwiGLU), "cdmoe" (an MLP without a gate and thousands of one-neuron experts, of which each
            token uses a few) or "none" (the layer ends with its token mixer) for all layers, or a list with one name a
            layer. Default: "mlp".
        use_output_gate: recurrent layers but windows multiply outputs by SiLU of a map of the input. Default: False.
        use_output_norm: they norm the output of each head, before the gate (RMSNorm). Default: False.
        rope_parameters: rotary embeddings as in Transformers, `{"rope_type": "default", "rope_theta": 10000.0}`;
            softmax layers rotate queries and keys. "dynamic" and "longrope", whose angles depend on the length (here of
            each row or document alone), are for models of attention layers only. Default: None, no rotary embeddings.
        rope_placement: where recurrent layers rotate queries and keys: "before" or "after" the feature map (the same
            where a key has none), or None, not at all. Default: None.
        bidirectional: softmax layers see later tokens too; for classifiers without recurrent layers. Default: False.
        use_cls_token: classifiers append a learned token and read the class there. Default: False.
        patch_size: classifiers cut `pixel_values` into squares of so many pixels a side, one token each. Default: None.
        num_channels: channels of those images. Default: 3.
        hidden_act: activation of the feed-forward layer. Default: "silu".
        rms_norm_eps: epsilon of every RMSNorm. Default: 1e-6.
        attention_bias: biases in the projections of "softmax" and "window" layers, as in a Llama. Default: False.
        attention_dropout: dropout of the softmax weights. Default: 0.0.
        initializer_range: standard deviation of linear and embedding weights; projections back into the residual stream
            start with this over sqrt(2 N). Default: 0.02.
        tie_word_embeddings: share input and output embeddings. Default: False.
        max_position_embeddings: the context length evaluations may assume; the recurrence has no limit. Default: 2048.
        residual_in_fp32: keep the residual stream in float32 in a model of a lower precision. Default: False.
        learned_state: recurrent layers begin every row and document with a learned state instead of zeros (state
            tuning, see `add_learned_state`). Default: False.
        state_dtype: of recurrent states in a cache: "float32", "float64", "bfloat16" or "float16". Default: "float32".
        backend: how the operator is computed, see `interdomain_attention`; "s4d" layers know "chunk" and "triton"
            alone, "ssd" and "selective_scan" layers "recurrent" too; for another it is "auto". Default: "auto".
        chunk_size: tokens per chunk of the operator. Default: 64.
        max_rollback: how many of the last tokens a cache that records (assisted decoding) can take back at least.
            Default: 64.
        use_cache, pad_token_id, bos_token_id, eos_token_id: as in Transformers. Default: True, None, 1 and 2.
    """

    # Of each class its own: whole numbers that must be positive, finite numbers from 0 to another, and fields with a
    # choice of values.
    _positive: ClassVar[list[str]] = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "conv_kernel",
        "chunk_size",
        "max_position_embeddings",
    ]
    _most: ClassVar[dict[str, float]] = {
        "rms_norm_eps": float("inf"),
        "initializer_range": float("inf"),
        "attention_dropout": 1.0,
    }
    _choices: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "rope_placement": (None, "before", "after"),
        "state_dtype": ("float32", "float64", "bfloat16", "float16"),
        "backend": ("auto", "recurrent", "fft", "scan", "associative_scan", "chunk", "triton"),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    conv_kernel: int = 4
    token_mixers: str | list[str] = "interdomain"
    feed_forwards: str | list[str] = "mlp"
    use_output_gate: bool = False
    use_output_norm: bool = False
    rope_parameters: dict | None = None
    rope_placement: str | None = None
    bidirectional: bool = False
    use_cls_token: bool = False
    patch_size: int | None = None
    num_channels: int = 3
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    residual_in_fp32: bool = False
    learned_state: bool = False
    state_dtype: str = "float32"
    backend: str = "auto"
    chunk_size: int = 64
    max_rollback: int = 64
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    @property
    def mixers_per_layer(self) -> list[str]:
        """The token mixer of every layer."""
        return self._per_layer(self.token_mixers)

    @property
    def feed_forwards_per_layer(self) -> list[str]:
        """The feed-forward layer of every layer."""
        return self._per_layer(self.feed_forwards)

    def _per_layer(self, names) -> list:
        if isinstance(names, list | tuple):
            return list(names)[: self.num_hidden_layers]
        return [names] * self.num_hidden_layers

    def check_values(self) -> None:
        """Each field, of whatever family, has a value that it can have."""
        declared = [vars(kind) for kind in reversed(type(self).__mro__)]
        for name in (name for kind in declared for name in kind.get("_positive", ())):
            value = getattr(self, name)
            if value is None or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value}.")
        for name, most in (item for kind in declared for item in kind.get("_most", {}).items()):
            value = getattr(self, name)
            if value is None or not (0 <= value <= most and value < float("inf")):
                end = "" if most == float("inf") else f" to {most:g}"
                raise ValueError(f"{name} must be a finite number from 0{end}, got {value}.")
        for name, choices in (item for kind in declared for item in kind.get("_choices", {}).items()):
            if getattr(self, name) not in choices:
                names = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name} must be one of {names}; got {getattr(self, name)!r}.")

    def check_count(self, field: str, most: float = float("inf")) -> None:
        """A list has a name for each layer, and no more than so many."""
        names = getattr(self, field)
        if isinstance(names, list) and not self.num_hidden_layers <= len(names) <= most:
            raise ValueError(
                f"{field} has {len(names)} names for num_hidden_layers = {self.num_hidden_layers}; give one name a "
                "layer, or one for all."
            )

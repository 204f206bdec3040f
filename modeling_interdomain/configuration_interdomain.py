"""Everything that can be chosen about an Interdomain model."""

import sys

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from .module_rotary import LENGTH_DEPENDENT
from .module_sparse_parts import check_parts, numbers_kept
from .module_tensor_parallel import LAYERS
from .module_versions import CACHE_NAME
from .registry_interdomain import FEED_FORWARDS, TOKEN_MIXERS

logger = logging.get_logger(__name__)

_CHOICES = {
    "start": ("recall", "random"),
    "feature_map": ("silu_l2", "fourier", "fourier_shifted"),
    "product": ("bilinear", "hermitian", "real"),
    "coefficient_matrix": ("full", "diagonal", "identity"),
    "state_input": (None, "key_value", "generic"),
    "rope_placement": (None, "before", "after"),
    "input_matrix_init": ("zero_order_hold", "unit_variance", "one"),
    "modes": ("s4d_inv", "s4d_lin", "uniform"),
    "time_step_spacing": ("random", "even"),
    "coefficient_init": ("normal", "identity", "posterior"),
    "query_init": ("independent", "induction"),
    "state_dtype": ("float32", "float64", "bfloat16", "float16"),
    "ssd_dt_bias": (None, "zero", "time_step"),
    "ssd_norm": (None, "before_gate", "after_gate"),
    "expert_input": ("cross_domain", "hidden"),
    "expert_score": ("raw", "softmax", "sigmoid"),
    "inner_value_weights": ("softmax", "one"),
    "dynamic_mask": (None, "position", "hard", "value"),
    "sparse_hash": ("argmax", "sign"),
    "sparse_hash_center": (None, "prefix"),
    "sparse_query_init": ("independent", "induction"),
    "ranking_target": ("sum", "mean"),
    "backend": ("auto", "recurrent", "fft", "scan", "associative_scan", "chunk", "triton"),
}

# Tensor parallelism: of feed-forward layers, and of token mixers whose heads are not shared out.
_DIVIDED_MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_GATHERED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output")

# What `start` puts in the place of fields that are not given.
STARTS = {
    "recall": {
        "product": "hermitian",
        "modes": "uniform",
        "input_matrix_init": "unit_variance",
        "coefficient_init": "posterior",
        "query_init": "induction",
        "time_step_min": 0.02,
        "time_step_max": 0.1,
        "time_step_spacing": "even",
    },
    "random": {
        "product": "bilinear",
        "modes": "s4d_inv",
        "input_matrix_init": "zero_order_hold",
        "coefficient_init": "normal",
        "query_init": "independent",
        "time_step_min": 1e-3,
        "time_step_max": 1e-1,
        "time_step_spacing": "random",
    },
}
_RECALL_RMS = 0.02

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "feature_dim",
    "state_size",
    "conv_kernel",
    "chunk_size",
    "max_position_embeddings",
    "ssd_state_size",
    "ssd_groups",
    "ssd_conv_kernel",
    "scan_state_size",
    "inner_values",
    "inner_value_dim",
    "inner_values_per_token",
    "sparse_keys",
    "sparse_key_dim",
    "sparse_hash_size",
)


@strict
class InterdomainConfig(PreTrainedConfig):
    r"""Configuration of an Interdomain language model; the defaults are the 125M shape of the paper.

    Args:
        vocab_size: number of tokens. Default: 32000.
        hidden_size: width of the residual stream, d. Default: 768.
        intermediate_size: width of the SwiGLU layer. Default: None, 8 d / 3 rounded up to a multiple of 128.
        num_hidden_layers: number of layers, N. Default: 12.
        num_attention_heads: query heads, H. Default: 12.
        num_key_value_heads: key/value groups, G, a divisor of H. Default: None, as many as query heads.
        head_dim: value dimension of a head, D. Default: None, `hidden_size / num_attention_heads`.
        feature_dim: feature dimension of queries and keys, R. Default: None, `head_dim`.
        state_size: number of complex basis functions, the modes, M. Default: 64.
        conv_kernel: width of the causal convolution of queries and keys, in tokens; of "selective_scan" layers that of
            their input. Default: 4.
        token_mixers: "interdomain", "s4d" (the same state read by a learned vector, no query), "ssd" (state space
            duality, whose fields begin with ssd; Mamba-2 is a case of it), "selective_scan" (the layer of Mamba, whose
            fields begin with scan), "softmax" or "inner_function" (softmax attention whose values are the input times a
            learned vector that each token chooses, from "Wonderful Matrices") for all layers, or a list with one name a
            layer. Default: "interdomain".
        feed_forwards: "mlp" (SwiGLU), "cdmoe" (an MLP without a gate and thousands of one-neuron experts, of which each
            token uses a few) or "none" (the layer ends with its token mixer) for all layers, or a list with one name a
            layer. Default: "mlp".
        num_experts: experts of a "cdmoe" layer; their product keys are a grid of the two factors nearest the root.
            Default: None, 4 d.
        expert_heads: retrieval heads, each with keys of its own. Default: None, `hidden_size / 256`, at least 1.
        experts_per_head: experts that a head finds for a token. Default: None, `2 * expert_heads`.
        expert_key_dim: width of a query; each half is compared with one of the two product keys, so it is even.
            Default: 256.
        expert_input: what the experts read: "cross_domain" (the output of the shared MLP) or "hidden" (its input).
            Default: "cross_domain".
        expert_score: how much of an expert is used: "raw" (the score, inside the activation), or outside of it
            "softmax" (over the experts of a head) or "sigmoid". Default: "raw".
        aux_loss_coef: what the sum of the auxiliary losses of all layers is multiplied with before it joins the
            training loss; only registered feed-forward layers have any. Default: 0.001.
        state_input: what drives the state: "key_value" (convolution and feature map on keys, values as they are) or
            "generic" (two linear maps, each after a convolution). Default: None, "key_value" in "interdomain" layers
            and "generic" in "s4d" layers.
        feature_map: the map xi of queries and keys: "silu_l2" is SiLU(x) / ||SiLU(x)|| (eq. 10), "fourier" a cosine
            and a sine of R / 2 learned frequencies with softmax weights a head, "fourier_shifted" R cosines with
            learned phases (both: the workshop paper; they read `head_dim` numbers). Default: "silu_l2".
        start: how "interdomain" and "s4d" layers start, in all the fields below that are not given. "recall": a state
            that tells the last 2M tokens apart, and queries that ask it what followed the last time their token came;
            "random": the S4D start, with C and queries drawn at random, and eq. 13 as written. Default: None, "recall"
            where it can be (some such layer, the hermitian product, a learned C, the feature map "silu_l2", no
            `normalize`), else "random". A saved configuration without the field is of the time before it: "random".
        product: how the coefficients of keys and values are multiplied: "bilinear" (eq. 13), "hermitian" or "real".
            Default: None, "hermitian" with `start` "recall", "bilinear" with "random".
        coefficient_matrix: the learned matrix C: "full", "diagonal" or "identity". Default: "full".
        normalize: divide by the readout of a constant value 1 (the workshop paper, eq. 8). Nothing keeps the divisor
            from zero: train with small steps, 3e-4 as in recipes/sequential-cifar10.yaml. Default: False.
        input_norm: RMSNorm and a bias a group on key features and values (eq. 12). Default: True.
        use_output_gate: multiply the output by SiLU of a linear map of the input. Default: False.
        use_output_norm: RMSNorm on the output of each head, before the gate. Default: False.
        rope_parameters: rotary embeddings as in Transformers, `{"rope_type": "default", "rope_theta": 10000.0}`;
            softmax layers rotate queries and keys. "dynamic" and "longrope", whose angles depend on the length (here of
            each row or document alone), are for models of attention layers only. Default: None, no rotary embeddings.
        rope_placement: where recurrent layers rotate queries and keys: "before" or "after" the feature map (the same
            where a key has none), or None, not at all. Default: None.
        modes: start of the frequencies Im A: "s4d_inv", "s4d_lin", or "uniform", phases Delta Im A = pi (n + 1/2) / M a
            token whatever the step, which resolve the last 2M tokens and alias beyond. The decay is Delta / 2 a token.
            Default: None, "uniform" or, with `start` "random", "s4d_inv".
        input_matrix_init: start of beta: "zero_order_hold" ((lambda - 1) / A), "unit_variance" (sqrt(1 - |lambda|^2))
            or "one". Default: None, "unit_variance" or, with `start` "random", "zero_order_hold".
        coefficient_init: start of C: "normal" (complex normal), "identity", or "posterior", with which the kernel of
            the ages of keys and values comes closest to the identity: C^H C is the inverse Gramian of the modes
            (of each mode alone for a diagonal C). That is the optimum of product "hermitian", which "interdomain"
            layers then need; the modes of "s4d" layers it makes orthonormal. Default: None, "posterior" or, with
            `start` "random", "normal".
        coefficient_init_scale: of "normal": the variance is `coefficient_init_scale^2 / M` ("diagonal":
            `coefficient_init_scale^2`). Default: 0.25.
        coefficient_init_noise: of "posterior": what is added to the diagonal of the Gramian, relative to its mean, so
            that nearly equal modes do not start with large coefficients. Default: 1e-3.
        output_init_rms: root mean square of the output before `o_proj` at the start, to which C is scaled, as queries
            of unit length with white keys and values of unit size (as `input_norm` makes them) meet it after many
            tokens; correlated tokens give more. Default: None, 0.02 where `start` "recall" chose `coefficient_init`
            and the scale of C counts, else as C and beta make it.
        query_init: "independent" draws the query projection by itself; "induction" makes it start as that of the keys,
            and the convolutions as the query's own token and, for keys, the token before (and a tenth of their own), so
            that a layer reads first what came after earlier occurrences of the token (the induction heads of arXiv
            2209.11895, the shift of H3, arXiv 2212.14052). Default: None, "induction" or, with `start` "random" and
            where there is nothing to shift or the projections differ in size, "independent".
        bidirectional: softmax layers see later tokens too; for classifiers without recurrent layers. Default: False.
        use_cls_token: classifiers append a learned token and read the class there. Default: False.
        patch_size: classifiers take `pixel_values` and cut them into squares of so many pixels a side, each one token.
            Default: None, no images.
        num_channels: channels of those images. Default: 3.
        time_step_min: smallest step Delta at the start. Default: None, 0.02 or, with `start` "random", 1e-3.
        time_step_max: largest step Delta at the start. Default: None, 0.1.
        time_step_spacing: how the steps of the groups of a layer lie between the two, in the logarithm: "random"
            (drawn uniformly) or "even" (spread evenly, not drawn; the middle for one group). Default: None, "even" or,
            with `start` "random", "random".
        hidden_act: activation of the feed-forward layer. Default: "silu".
        rms_norm_eps: epsilon of every RMSNorm. Default: 1e-6.
        attention_dropout: dropout of the softmax weights. Default: 0.0.
        initializer_range: standard deviation of linear and embedding weights; projections back into the residual stream
            start with this over sqrt(2 N). Default: 0.02.
        tie_word_embeddings: share input and output embeddings. Default: False.
        max_position_embeddings: the context length evaluations may assume; the recurrence has no limit. Default: 2048.
        ssd_state_size: of "ssd" layers: the numbers N that a state has for each of the P of a head; rotary embeddings
            (`rope_placement`, "before" or "after" alike) turn these. Default: 128.
        ssd_groups: what B and C of the heads are shared in, a divisor of the heads. Default: 1.
        ssd_heads: heads of "ssd" layers. Default: None, `num_attention_heads`.
        ssd_head_dim: value dimension of their heads, P. Default: None, `head_dim`.
        ssd_conv_kernel: width of the causal convolution of x, B and C, in tokens; 1 is none, 4 that of Mamba-2 and of
            the Conv1d control of Cheems. Default: 1.
        ssd_conv_bias: give these convolutions a bias. Default: False.
        ssd_activation: of x, B and C after it, "silu" in Mamba-2. Default: None.
        ssd_skip: add the input of each head times a learned number, D. Default: True.
        ssd_dt_bias: start of the bias of the time step dt before its softplus: "zero", "time_step" (that of Mamba-2:
            dt is drawn between `time_step_min` and `time_step_max`, uniformly in the logarithm), or None, no bias.
            Default: "zero".
        ssd_dt_limit: least and largest dt after the softplus. Default: None, no limit.
        ssd_norm: RMSNorm over the heads of a group "before_gate" or "after_gate" (`use_output_gate`; Mamba-2 has the
            latter). Default: None.
        ssd_bias: give the projections of these layers biases. Default: False.
        scan_channels: of "selective_scan" layers: the channels E that each have a state. Default: None,
            `2 * hidden_size`.
        scan_state_size: the numbers N of the state of a channel. Default: 16.
        scan_step_rank: what the steps of all channels are computed from, the rank R of their map. Default: None,
            `hidden_size / 16`, rounded up.
        scan_bias: give the projections from and to the residual stream biases. Default: False.
        scan_conv_bias: give the convolution (of `conv_kernel` tokens) a bias. Default: True.
        residual_in_fp32: keep the residual stream in float32 in a model of a lower precision. Default: False.
        learned_state: recurrent layers begin every row and document with a learned state instead of zeros (state
            tuning, see `add_learned_state`). Default: False.
        state_dtype: dtype of the recurrent state in the cache: "float32", "float64", "bfloat16" or "float16". Default:
            "float32".
        backend: how the operator is computed, see `interdomain_attention`; "s4d" layers know "chunk" and "triton"
            alone, "ssd" and "selective_scan" layers "recurrent" too; for another it is "auto". Default: "auto".
        chunk_size: tokens per chunk of the operator. Default: 64.
        max_rollback: how many of the last tokens a cache that records (assisted decoding) can take back. Default: 64.
        inner_values: "inner_function": learned vectors of width `hidden_size`, n_v. Default: 6.
        inner_value_dim: "inner_function": numbers of the query that chooses among them. Default: 128.
        inner_values_per_token: "inner_function": vectors that a token chooses. Default: 1.
        inner_value_weights: "inner_function": "softmax" weighs a chosen vector by its softmax score among all, so that
            the choice is learned; "one" does not, and the choice stays as it starts. Default: "softmax".
        dynamic_mask: what fades keys in "softmax" and "inner_function" layers (the same paper): "position", a learned
            number a head and position, from 1, that multiplies the value; "hard", the same rounded to 0 or 1, with the
            gradient straight through; "value", a bias of the scores that is computed from the value (Doge). Default:
            None.
        dynamic_mask_window: of "value": a head sees only so many of the keys so far, those of the largest bias (of
            equal ones the later), and a cache keeps no more. Default: None, all.
        sparse_attention: what every recurrent layer has beside it, a softmax attention to a few keys (HAX): "lsh" (the
            latest keys of the query's hash bin), "key_selection" (the best keys by a learned score), "sliding_window"
            (the latest), "sink" (the first), "dilated" (the latest of every m-th, m = `max_position_embeddings` /
            keys), "full" (the last `max_position_embeddings`), some of them joined by "+", or "hax" for
            "lsh+key_selection"; or a list with one a layer, None for none. Default: None, no layer has any.
        sparse_keys: keys that a query sees, split evenly among the parts. Default: 64.
        sparse_num_heads: heads of the branch, a divisor of the groups of values. Default: None, as many as these.
        sparse_key_dim: width of its queries and keys. Default: 16.
        sparse_hash: "argmax" of random projections, or "sign", the bits that say which of them are positive.
            Default: "argmax".
        sparse_hash_size: projections: bins of "argmax", bits of "sign". Default: 64.
        sparse_hash_center: hash what is left of queries and keys without the mean of all so far ("prefix"), or None.
            Default: "prefix".
        sparse_gate_init: start of the factor, one a channel, of what the branch adds. Default: None, as loud as the
            recurrence: `output_init_rms`, or 1 where that is not set.
        sparse_query_init: as `query_init`, of the branch, in layers whose recurrence does not start with "induction"
            itself. Default: None, "induction" or, where `start` is given as "random" or there is nothing to shift,
            "independent".
        ranking_loss_coef: what the ranking losses of the learned scores, summed over the layers, are multiplied with
            before they join the training loss; 0 freezes the scores. Default: 0.1.
        ranking_target: what ranks keys: the "sum" of what later queries make of them, or its "mean". Default: "sum".
        use_cache, pad_token_id, bos_token_id, eos_token_id: as in Transformers. Default: True, None, 1 and 2.

    Raises:
        ValueError: when a field has an unknown value or two fields contradict each other.

    Example:

        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config)
    """

    model_type = "interdomain"
    keys_to_ignore_at_inference = [CACHE_NAME]
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    feature_dim: int | None = None
    state_size: int = 64
    conv_kernel: int = 4
    token_mixers: str | list[str] = "interdomain"
    feed_forwards: str | list[str] = "mlp"
    num_experts: int | None = None
    expert_heads: int | None = None
    experts_per_head: int | None = None
    expert_key_dim: int = 256
    expert_input: str = "cross_domain"
    expert_score: str = "raw"
    aux_loss_coef: float = 0.001
    state_input: str | None = None
    feature_map: str = "silu_l2"
    start: str | None = None
    product: str | None = None
    coefficient_matrix: str = "full"
    normalize: bool = False
    input_norm: bool = True
    use_output_gate: bool = False
    use_output_norm: bool = False
    rope_parameters: dict | None = None
    rope_placement: str | None = None
    modes: str | None = None
    input_matrix_init: str | None = None
    coefficient_init: str | None = None
    coefficient_init_scale: float = 0.25
    coefficient_init_noise: float = 1e-3
    output_init_rms: float | None = None
    query_init: str | None = None
    bidirectional: bool = False
    use_cls_token: bool = False
    patch_size: int | None = None
    num_channels: int = 3
    time_step_min: float | None = None
    time_step_max: float | None = None
    time_step_spacing: str | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    ssd_state_size: int = 128
    ssd_groups: int = 1
    ssd_heads: int | None = None
    ssd_head_dim: int | None = None
    ssd_conv_kernel: int = 1
    ssd_conv_bias: bool = False
    ssd_activation: str | None = None
    ssd_skip: bool = True
    ssd_dt_bias: str | None = "zero"
    ssd_dt_limit: list[float] | None = None
    ssd_norm: str | None = None
    ssd_bias: bool = False
    scan_channels: int | None = None
    scan_state_size: int = 16
    scan_step_rank: int | None = None
    scan_bias: bool = False
    scan_conv_bias: bool = True
    residual_in_fp32: bool = False
    learned_state: bool = False
    state_dtype: str = "float32"
    backend: str = "auto"
    chunk_size: int = 64
    max_rollback: int = 64
    inner_values: int = 6
    inner_value_dim: int = 128
    inner_values_per_token: int = 1
    inner_value_weights: str = "softmax"
    dynamic_mask: str | None = None
    dynamic_mask_window: int | None = None
    sparse_attention: str | list[str | None] | None = None
    sparse_keys: int = 64
    sparse_num_heads: int | None = None
    sparse_key_dim: int = 16
    sparse_hash: str = "argmax"
    sparse_hash_size: int = 64
    sparse_hash_center: str | None = "prefix"
    sparse_gate_init: float | None = None
    sparse_query_init: str | None = None
    ranking_loss_coef: float = 0.1
    ranking_target: str = "sum"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs):
        kwargs.pop("layer_types", None)  # derived from token_mixers
        self._check_names()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                    f"{self.num_attention_heads}; change one of them or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.feature_dim is None:
            self.feature_dim = self.head_dim
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 128)) * 128
        self._choose_start()
        self._ask_parts("complete_config")
        super().__post_init__(**kwargs)
        self._name_unknown_fields(kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in the library; what was written before there was a `start` means "random"."""
        return super().from_dict({"start": "random"} | config_dict, **kwargs)

    def _choose_start(self) -> None:
        """Fill in how the recurrent layers start."""
        if self.sparse_query_init is None:
            alone = self.start == "random" or self.conv_kernel < 2
            self.sparse_query_init = "independent" if alone else "induction"
        if self.start is None:
            possible = (
                any(TOKEN_MIXERS[name].can_start_to_recall for name in self.mixers_per_layer)
                and self.product in (None, "hermitian")
                and self.coefficient_matrix != "identity"
                and self.feature_map == "silu_l2"
                and not self.normalize
            )
            self.start = "recall" if possible else "random"
        scaled = not (self.normalize or self.use_output_norm or self.coefficient_matrix == "identity")
        if self.start == "recall" and self.coefficient_init is None and self.output_init_rms is None and scaled:
            self.output_init_rms = _RECALL_RMS
        if self.query_init is None and self._induction_problem() is not None:
            self.query_init = "independent"
        if self.sparse_gate_init is None:
            self.sparse_gate_init = 1.0 if self.output_init_rms is None else self.output_init_rms
        for name, value in STARTS.get(self.start, {}).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def _induction_problem(self) -> str | None:
        """Why queries cannot start as keys do, or None."""
        if self.conv_kernel < 2:
            return f"shifts keys by a token, which conv_kernel = {self.conv_kernel} cannot"
        if self.state_input == "generic" and self.mapped_dim != self.feature_dim:
            return "makes queries start as keys do, which have another width here"
        return None

    def to_dict(self):
        """As in the library; PEFT asks for it just before it looks up what to adapt, whenever PEFT was imported."""
        _register_with_peft()
        return super().to_dict()

    def convert_rope_params_to_dict(self, **kwargs):
        """Leave `rope_parameters=None` alone: here it means no rotary embeddings, not the default ones."""
        if self.rope_parameters is None and kwargs.get("rope_scaling") is None and "rope_theta" not in kwargs:
            kwargs.pop("rope_scaling", None)
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)

    def validate_architecture(self):
        """Checked whenever a configuration is made, and again when it is saved or loaded."""
        self.check_model()
        for field in ("token_mixers", "feed_forwards", "sparse_attention"):
            self._check_count(field, most=self.num_hidden_layers)
        self._check_start()

    def check_model(self) -> None:
        """Raise a ValueError where no model can be made, or would compute something else than the fields say.

        A model asks for this too: fields can be assigned after a configuration is made, and overrides of
        `from_pretrained` are. Whether fields of the start go together is not looked at, since a loaded model does not
        start, nor are the names of layers that a smaller number cuts off.
        """
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is None or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                names = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name} must be one of {names}; got {getattr(self, name)!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} must divide num_attention_heads = "
                f"{self.num_attention_heads}."
            )
        self._check_names()
        if self.rope_placement is not None and self.rope_parameters is None:
            raise ValueError(
                f"rope_placement = {self.rope_placement!r} needs rope_parameters, for example "
                '{"rope_type": "default", "rope_theta": 10000.0}.'
            )
        if self.rope_parameters is not None and (self.feature_dim % 2 or self.head_dim % 2):
            raise ValueError(
                f"rope_parameters needs an even head_dim and feature_dim, got {self.head_dim} and {self.feature_dim}."
            )
        kind = (self.rope_parameters or {}).get("rope_type")
        if kind in LENGTH_DEPENDENT and self.rotated_dims and set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                f'rope_type "{kind}" changes its angles with the length, and the state of recurrent layers cannot be '
                'rotated again: choose another, such as "default", or attention in all layers.'
            )
        if self.feature_map != "silu_l2" and self.rope_placement is not None:
            raise ValueError(f"feature_map = {self.feature_map!r} knows no rotations: set rope_placement=None.")
        if self.feature_map == "fourier" and self.feature_dim % 2:
            raise ValueError(f'feature_map = "fourier" needs an even feature_dim, got {self.feature_dim}.')
        if self.bidirectional and set(self.layer_types) != {"full_attention"}:
            raise ValueError("bidirectional needs softmax in all layers: a recurrent layer sees earlier tokens only.")
        if self.patch_size is not None and (self.patch_size < 1 or self.num_channels < 1):
            raise ValueError(
                f"patch_size and num_channels must be positive, got {self.patch_size} and {self.num_channels}."
            )
        if self.normalize and "s4d" in self.mixers_per_layer:
            raise ValueError(
                'normalize divides by a readout of the query, and "s4d" layers have none; set it to False.'
            )
        if self.aux_loss_coef < 0:
            raise ValueError(f"aux_loss_coef must not be negative, got {self.aux_loss_coef}.")
        self._check_start_values()
        self._ask_parts("check_config")
        self._check_sparse()
        if self.max_rollback < 0:
            raise ValueError(f"max_rollback must not be negative, got {self.max_rollback}.")
        self._check_dynamic_mask()

    def _check_dynamic_mask(self) -> None:
        """There are layers that it masks, and a window has a value to go by."""
        window = self.dynamic_mask_window
        if window is not None and self.dynamic_mask != "value":
            raise ValueError(
                f'dynamic_mask_window = {window} keeps the keys of the largest bias: it needs dynamic_mask = "value", '
                f"got {self.dynamic_mask!r}."
            )
        if window is not None and window < 1:
            raise ValueError(f"dynamic_mask_window must be positive, or None; got {window}.")
        if window is not None and self.bidirectional:
            raise ValueError("dynamic_mask_window goes by the keys so far: set it to None, or bidirectional to False.")
        mixers = [self.token_mixers] if isinstance(self.token_mixers, str) else self.token_mixers  # and what is cut off
        if self.dynamic_mask and not any(TOKEN_MIXERS[name].takes_dynamic_mask for name in mixers):
            raise ValueError(
                f"dynamic_mask = {self.dynamic_mask!r} masks attention layers, and token_mixers has none: add "
                '"softmax" or "inner_function", or set it to None.'
            )

    def _check_sparse(self) -> None:
        """The branches can be made, and stand beside layers that can have one."""
        self._check_count("sparse_attention")
        if not 0 <= self.ranking_loss_coef < float("inf"):
            raise ValueError(
                f"ranking_loss_coef must be finite and not negative, got {self.ranking_loss_coef}; 0 leaves the loss "
                "out."
            )
        for mixer, branch in zip(self.mixers_per_layer, self.sparse_per_layer):
            if branch is None:
                continue
            if not TOKEN_MIXERS[mixer].can_branch:
                raise ValueError(
                    f'sparse_attention stands beside recurrent layers, and "{mixer}" is none: give a list with None '
                    "for such layers."
                )
            check_parts(self, branch, TOKEN_MIXERS[mixer].written_shape(self)[0])

    def _check_start_values(self) -> None:
        """Each number of the start is one that can be computed with."""
        if not 0 < self.time_step_min <= self.time_step_max:
            raise ValueError(
                f"time_step_min = {self.time_step_min} must be positive and at most time_step_max = "
                f"{self.time_step_max}."
            )
        if not self.coefficient_init_noise >= 1e-10:
            raise ValueError(
                f"coefficient_init_noise must be at least 1e-10, which float64 can tell from 0; got "
                f"{self.coefficient_init_noise}."
            )
        if self.output_init_rms is not None and not 0 < self.output_init_rms < float("inf"):
            raise ValueError(f"output_init_rms must be positive and finite, or None; got {self.output_init_rms}.")

    def _check_start(self) -> None:
        """What is asked of C and of queries at the start can be done, and has an effect."""
        if self.query_init == "induction" and (problem := self._induction_problem()) is not None:
            raise ValueError(f'query_init = "induction" {problem}: set it to "independent".')
        if self.sparse_query_init == "induction" and self.conv_kernel < 2:
            problem = f"shifts keys by a token, which conv_kernel = {self.conv_kernel} cannot"
            raise ValueError(f'sparse_query_init = "induction" {problem}: set it to "independent".')
        if self.coefficient_init == "posterior" and self.coefficient_matrix == "identity":
            raise ValueError(
                'coefficient_init = "posterior" starts a coefficient matrix: set coefficient_matrix to "full" or '
                '"diagonal".'
            )
        if (
            self.coefficient_init == "posterior"
            and self.product != "hermitian"
            and "interdomain" in self.mixers_per_layer
        ):
            raise ValueError(
                f'coefficient_init = "posterior" is the optimum of the hermitian product, and product is '
                f'"{self.product}": set product="hermitian".'
            )
        if self.output_init_rms is None:
            return
        if self.coefficient_matrix == "identity":
            raise ValueError('output_init_rms scales the coefficient matrix, and "identity" has none: set it to None.')
        if self.normalize or self.use_output_norm:
            name = "normalize" if self.normalize else "use_output_norm"
            raise ValueError(f"output_init_rms has no effect with {name}, which divides by the scale: set it to None.")

    def _ask_parts(self, hook: str) -> None:
        """Let the classes that layers are made of fill in or check what is theirs, where they have something to say."""
        tables = (TOKEN_MIXERS, self.mixers_per_layer), (FEED_FORWARDS, self.feed_forwards_per_layer)
        for kind in (table[name] for table, names in tables for name in dict.fromkeys(names)):
            if (call := getattr(kind, hook, None)) is not None:
                call(self)

    def _name_unknown_fields(self, fields: dict) -> None:
        """Fields beyond ours and the library's are kept, but a misspelt one, or a newer version's, has no effect."""
        known = ("auto_map", "model_type", "quantization_config")
        if unknown := sorted(name for name in fields if name in vars(self) and name not in known and name[0] != "_"):
            logger.warning_once(
                f"InterdomainConfig does not know, and ignores, {', '.join(unknown)}: correct the name, or update "
                "modeling_interdomain if a newer version has saved it."
            )

    def _check_names(self) -> None:
        """The names of the layers' parts are known, and there is one a layer."""
        for field, table in (("token_mixers", TOKEN_MIXERS), ("feed_forwards", FEED_FORWARDS)):
            given = getattr(self, field)
            names = [given] if isinstance(given, str) else given
            if unknown := sorted(set(names) - set(table)):
                raise ValueError(
                    f"{field} must be made of {', '.join(table)} or what register_{field[:-1]} has added; got "
                    f"{', '.join(unknown)}."
                )
            self._check_count(field)

    def _check_count(self, field: str, most: float = float("inf")) -> None:
        """A list has a name for each layer, and no more than so many."""
        names = getattr(self, field)
        if isinstance(names, list) and not self.num_hidden_layers <= len(names) <= most:
            raise ValueError(
                f"{field} has {len(names)} names for num_hidden_layers = {self.num_hidden_layers}; give one name a "
                "layer, or one for all."
            )

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The library's tensor parallel plan: each process holds its part of the heads, with their states.

        Where a layer's heads cannot be shared out, all processes hold them all, and the projections alone are divided:
        a plan has one entry for the modules of a name in all layers, so it is so in all.
        """
        # `from_pretrained` puts it here before it makes a model.
        processes = getattr(getattr(self, "distributed_config", None), "tp_size", 1)
        reason = self._undivided(processes)
        if reason is not None and processes > 1:
            logger.warning_once(
                f"All heads and their states are in every process of tp_size = {processes}, because {reason}; leave "
                "q_proj, k_proj and v_proj out of target_modules of a PEFT adapter, which would not fit them."
            )
        parts = _GATHERED if reason is not None else self._head_plan()
        plan = {f"layers.*.token_mixer.{name}".rstrip("."): style for name, style in parts.items()}
        return plan | {"layers.*": LAYERS} | {f"layers.*.mlp.{name}": style for name, style in _DIVIDED_MLP.items()}

    def _undivided(self, processes: int) -> str | None:
        """Why so many processes cannot share out the heads of all layers, or None."""
        if any(self.sparse_per_layer):
            return "a sparse branch reads what all of them write"
        reasons = (TOKEN_MIXERS[name].undivided(self, processes) for name in self.mixers_per_layer)
        return next((reason for reason in reasons if reason is not None), None)

    def _head_plan(self) -> dict[str, str]:
        plans = [TOKEN_MIXERS[name].head_plan(self) for name in dict.fromkeys(self.mixers_per_layer)]
        return {name: style for plan in plans for name, style in plan.items()}

    @property
    def mapped_dim(self) -> int:
        """The numbers a head that the feature map reads."""
        return self.feature_dim if self.feature_map == "silu_l2" else self.head_dim

    @property
    def mixers_per_layer(self) -> list[str]:
        """The token mixer of every layer."""
        return self._per_layer(self.token_mixers)

    @property
    def feed_forwards_per_layer(self) -> list[str]:
        """The feed-forward layer of every layer."""
        return self._per_layer(self.feed_forwards)

    @property
    def sparse_per_layer(self) -> list[str | None]:
        """The sparse branch of every layer, None for none."""
        return self._per_layer(self.sparse_attention)

    def _per_layer(self, names) -> list:
        return (
            list(names)[: self.num_hidden_layers]
            if isinstance(names, list | tuple)
            else [names] * self.num_hidden_layers
        )

    @property
    def rotated_dims(self) -> list[int]:
        """The head sizes for which layers need cosines and sines."""
        if self.rope_parameters is None:
            return []
        return sorted(set().union(*(TOKEN_MIXERS[name].rotated_dims(self) for name in self.mixers_per_layer)))

    def state_sizes(self, context_length: int) -> dict[str, int]:
        """The numbers that a decoder keeps of one sequence, over all layers (the paper's table 5).

        Args:
            context_length: tokens read so far; only keys and values depend on it.

        Returns:
            "recurrent" (real numbers: 2 M (R + D) a group, one more column with `normalize`), "convolution" (the last
            inputs of the convolutions) and "keys_values"; with sparse branches also "sparse", their memory.

        Raises:
            ValueError: when a layer is a registered mixer that does not say its sizes.
        """
        sizes = {"recurrent": 0, "convolution": 0, "keys_values": 0}
        for name in self.mixers_per_layer:
            for kind, number in TOKEN_MIXERS[name].state_sizes(self, context_length).items():
                sizes[kind] += number
        for name, branch in zip(self.mixers_per_layer, self.sparse_per_layer):
            if branch is not None:
                window, memory = numbers_kept(self, branch, *TOKEN_MIXERS[name].written_shape(self))
                sizes["convolution"] += window
                sizes["sparse"] = sizes.get("sparse", 0) + memory
        return sizes

    @property
    def longest_text(self) -> int | None:
        """The positions that a mask has numbers for, where it goes by position; otherwise there is no longest text."""
        return self.max_position_embeddings if self.dynamic_mask in ("position", "hard") else None

    @property
    def windowed_layers(self) -> list[bool]:
        """Which layers keep the keys of the largest bias only."""
        window = self.dynamic_mask_window is not None
        return [window and TOKEN_MIXERS[name].takes_dynamic_mask for name in self.mixers_per_layer]

    @property
    def layer_types(self) -> list[str]:
        """What Transformers calls the layers; derived from `token_mixers`, so assignments have no effect."""
        return [TOKEN_MIXERS[name].layer_type for name in self.mixers_per_layer]

    @layer_types.setter
    def layer_types(self, value):
        pass


# What PEFT adapts in our models when it is not told: modules with the names that they have in Llama.
_TOKEN_MIXER = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _register_with_peft() -> None:
    """Enter the model type into PEFT's tables of default modules; without effect until PEFT has been imported."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            # Query and value alone would leave an S4D layer, which has no query, with one: as PEFT does for RWKV, all.
            modules = _TOKEN_MIXER if table["llama"] == ["q_proj", "v_proj"] else table["llama"]
            table.setdefault("interdomain", list(modules))

"""The layers whose state has complex modes, "interdomain" and "s4d": sizes, starts, and what they say of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...layers.configuration import HEADS, ModelFields
from ..configuration import Projection, RecurrentSpecification

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
# Those of the operator that let a token move the state in its own way.
GATED_BACKENDS = ("auto", "recurrent", "chunk", "triton")


@dataclass(kw_only=True, repr=False)
class InterdomainFields(ModelFields):
    """Fields of "interdomain" and "s4d" layers; the steps at the start are those of other recurrent layers too.

    Args:
        feature_dim: feature dimension of queries and keys, R. Default: None, `head_dim`.
        state_size: number of complex basis functions, the modes, M. Default: 64.
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
        gates: what each token of an "interdomain" layer says of the state itself. "forget": a factor of what the state
            holds and one of what is written, a group each, from linear maps of the token; they start near 1. "none":
            neither. "warp": in the place of the first factor, by how much time moves, lambda^step: a control for
            studies. Default: "none".
        delta_rule: let "interdomain" layers write a value without what the state already answers to its key, in a share
            that each token chooses for each group, so that a key that comes again is corrected instead of added up. For
            `start` "recall": from "random", without gates, such a state can grow without bound. Default: False.
        time_step_min: smallest step Delta at the start. Default: None, 0.02 or, with `start` "random", 1e-3.
        time_step_max: largest step Delta at the start. Default: None, 0.1.
        time_step_spacing: how the steps of the groups of a layer lie between the two, in the logarithm: "random"
            (drawn uniformly) or "even" (spread evenly, not drawn; the middle for one group). Default: None, "even" or,
            with `start` "random", "random".
    """

    _positive = ["feature_dim", "state_size"]
    _choices = {
        "start": ("recall", "random"),
        "feature_map": ("silu_l2", "fourier", "fourier_shifted"),
        "product": ("bilinear", "hermitian", "real"),
        "coefficient_matrix": ("full", "diagonal", "identity"),
        "state_input": (None, "key_value", "generic"),
        "input_matrix_init": ("zero_order_hold", "unit_variance", "one"),
        "modes": ("s4d_inv", "s4d_lin", "uniform"),
        "time_step_spacing": ("random", "even"),
        "coefficient_init": ("normal", "identity", "posterior"),
        "query_init": ("independent", "induction"),
        "gates": ("none", "forget", "warp"),
    }

    feature_dim: int | None = None
    state_size: int = 64
    state_input: str | None = None
    feature_map: str = "silu_l2"
    start: str | None = None
    product: str | None = None
    coefficient_matrix: str = "full"
    normalize: bool = False
    input_norm: bool = True
    modes: str | None = None
    input_matrix_init: str | None = None
    coefficient_init: str | None = None
    coefficient_init_scale: float = 0.25
    coefficient_init_noise: float = 1e-3
    output_init_rms: float | None = None
    query_init: str | None = None
    gates: str = "none"
    delta_rule: bool = False
    time_step_min: float | None = None
    time_step_max: float | None = None
    time_step_spacing: str | None = None

    @property
    def mapped_dim(self) -> int:
        """The numbers a head that the feature map reads."""
        return self.feature_dim if self.feature_map == "silu_l2" else self.head_dim

    @property
    def gate_names(self) -> list[str]:
        """What each token of an "interdomain" layer says beside query, key and value, in this order."""
        return [self.gates, "write"] * (self.gates != "none") + ["delta"] * self.delta_rule

    def check_gates(self) -> None:
        """Gates stand where some layer has them; whether it can have them, that says itself."""
        if self.gate_names and "interdomain" not in self.mixers_per_layer:
            raise ValueError(
                f'gates = "{self.gates}" and delta_rule = {self.delta_rule} are of "interdomain" layers, and '
                "token_mixers names none: leave them out."
            )

    def complete_start(self, mixers: Mapping[str, Any]) -> None:
        """Fill in how the recurrent layers start; `mixers` are the token mixers by their names."""
        if self.start is None:
            possible = (
                any(mixers[name].can_start_to_recall for name in self.mixers_per_layer)
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

    def check_start_values(self) -> None:
        """Each number of the start is one that can be computed with."""
        if not 0 < self.time_step_min <= self.time_step_max < float("inf"):
            raise ValueError(
                f"time_step_min = {self.time_step_min} must be positive and at most time_step_max = "
                f"{self.time_step_max}, which must be finite."
            )
        if not self.coefficient_init_noise >= 1e-10:
            raise ValueError(
                f"coefficient_init_noise must be at least 1e-10, which float64 can tell from 0; got "
                f"{self.coefficient_init_noise}."
            )
        if self.output_init_rms is not None and not 0 < self.output_init_rms < float("inf"):
            raise ValueError(f"output_init_rms must be positive and finite, or None; got {self.output_init_rms}.")

    def check_start(self) -> None:
        """What is asked of C and of queries at the start can be done, and has an effect."""
        if self.query_init == "induction" and (problem := self._induction_problem()) is not None:
            raise ValueError(f'query_init = "induction" {problem}: set it to "independent".')
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


class KeyValueSpecification(RecurrentSpecification):
    """A state driven by two projections, called keys and values."""

    can_start_to_recall = True
    shared_groups = "num_key_value_heads"
    default_state_input = "key_value"

    @classmethod
    def is_generic(cls, config) -> bool:
        return (config.state_input or cls.default_state_input) == "generic"

    @classmethod
    def projections(cls, config) -> list[Projection]:
        groups, generic = config.num_key_value_heads, cls.is_generic(config)
        key_width = config.feature_dim if generic else config.mapped_dim
        return [Projection("k", groups, key_width, True), Projection("v", groups, config.head_dim, generic)]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        width = config.feature_dim + config.head_dim + int(config.normalize)
        return config.num_key_value_heads, 2, config.state_size, width

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        mapped = len(cls.projections(config)) > 2 or not cls.is_generic(config)  # a query, or keys
        learned = mapped and config.feature_map != "silu_l2"
        return super().head_plan(config) | ({"feature_map": HEADS} if learned else {})


class InterdomainSpecification(KeyValueSpecification):
    """Queries join, and what a token says of the state itself where there are gates."""

    @classmethod
    def starts_with_induction(cls, config) -> bool:
        return config.query_init == "induction"

    @classmethod
    def projections(cls, config) -> list[Projection]:
        gates = [Projection(name, config.num_key_value_heads, 1, False, bias=True) for name in config.gate_names]
        query = Projection("q", config.num_attention_heads, config.mapped_dim, True)
        return [query, *super().projections(config), *gates]

    @classmethod
    def check_config(cls, config) -> None:
        if not config.gate_names:
            return
        field = "delta_rule" if config.gates == "none" else f'gates = "{config.gates}"'
        if config.normalize:
            raise ValueError(f"{field} needs the plain readout: set normalize to False, or leave {field} out.")
        warped = config.gates == "warp"
        if warped and config.delta_rule:
            raise ValueError('gates = "warp" has no delta rule: set delta_rule=False, or gates="forget".')
        backends = GATED_BACKENDS[:-1] if warped else GATED_BACKENDS  # warped time has no kernels
        if config.backend not in backends:
            raise ValueError(
                f'{field} lets every token move the state in its own way, and backend = "{config.backend}" needs one '
                f"way for all: choose one of {', '.join(backends)}."
            )
        if config.delta_rule and not config.input_norm:
            raise ValueError("delta_rule is measured by the size that input_norm gives keys: set input_norm=True.")
        if config.delta_rule and config.product != "hermitian":
            raise ValueError(
                "delta_rule is measured by what a key finds of itself, which the hermitian product alone keeps "
                f'positive, and product is "{config.product}": set product="hermitian".'
            )


class S4DSpecification(KeyValueSpecification):
    """The state of "interdomain" layers, all of which is output."""

    default_state_input = "generic"

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        return config.num_key_value_heads, config.feature_dim + config.head_dim

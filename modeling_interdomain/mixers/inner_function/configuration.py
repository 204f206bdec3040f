"""What a configuration says of "inner_function" layers, and these of themselves."""

from dataclasses import dataclass

from ...layers.configuration import ModelFields
from ..softmax.configuration import SoftmaxSpecification


@dataclass(kw_only=True, repr=False)
class InnerFunctionFields(ModelFields):
    """Fields of "inner_function" layers.

    Args:
        inner_values: "inner_function": learned vectors of width `hidden_size`, n_v. Default: 6.
        inner_value_dim: "inner_function": numbers of the query that chooses among them. Default: 128.
        inner_values_per_token: "inner_function": vectors that a token chooses. Default: 1.
        inner_value_weights: "inner_function": "softmax" weighs a chosen vector by its softmax score among all, so that
            the choice is learned; "one" does not, and the choice stays as it starts. Default: "softmax".
    """

    _positive = ["inner_values", "inner_value_dim", "inner_values_per_token"]
    _choices = {"inner_value_weights": ("softmax", "one")}

    inner_values: int = 6
    inner_value_dim: int = 128
    inner_values_per_token: int = 1
    inner_value_weights: str = "softmax"


class InnerFunctionSpecification(SoftmaxSpecification):
    """Softmax attention whose values are of all heads at once."""

    @classmethod
    def check_config(cls, config) -> None:
        """The values have the width of the input, and there are as many as a token chooses."""
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if groups != heads or heads * width != config.hidden_size:
            raise ValueError(
                '"inner_function" layers split the input itself into values: set num_key_value_heads = '
                f"num_attention_heads and num_attention_heads * head_dim = hidden_size; got {groups}, {heads}, {width} "
                f"and {config.hidden_size}."
            )
        if config.inner_values_per_token > config.inner_values:
            raise ValueError(
                f"inner_values_per_token = {config.inner_values_per_token} must be at most inner_values = "
                f"{config.inner_values}: a token chooses among these."
            )

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        return '"inner_function" layers choose the values of all heads at once'

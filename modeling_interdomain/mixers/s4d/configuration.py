"""What "s4d" layers say of themselves to a configuration."""

from ..interdomain.configuration import KeyValueSpecification


class S4DSpecification(KeyValueSpecification):
    """The state of "interdomain" layers, all of which is output."""

    default_state_input = "generic"

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        return config.num_key_value_heads, config.feature_dim + config.head_dim

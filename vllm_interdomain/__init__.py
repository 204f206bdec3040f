"""Interdomain models in vLLM: a plugin that vLLM finds by its entry point, so that it serves them without remote code.

`register` tells vLLM in each of its processes which class reads a checkpoint of this architecture, and what to ask of a
configuration before anything is allocated. All mathematics is that of `modeling_interdomain`.
"""

ARCHITECTURE = "InterdomainForCausalLM"


def register() -> None:
    """What the entry point in the group `vllm.general_plugins` names; a second call changes nothing."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import modeling_interdomain  # noqa: F401  # enters the configuration into AutoConfig

    from .checks import ServedConfig

    MODELS_CONFIG_MAP[ARCHITECTURE] = ServedConfig
    ModelRegistry.register_model(ARCHITECTURE, "vllm_interdomain.model:InterdomainForCausalLM")

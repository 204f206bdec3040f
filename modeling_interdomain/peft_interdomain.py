"""What PEFT adapts in our models when it is not told: modules with the names that they have in Llama."""

import sys

TOKEN_MIXER = ["q_proj", "k_proj", "v_proj", "o_proj"]


def register_with_peft() -> None:
    """Enter the model type into PEFT's tables of default modules; without effect until PEFT has been imported."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            # Query and value alone would leave an S4D layer, which has no query, with one: as PEFT does for RWKV, all.
            modules = TOKEN_MIXER if table["llama"] == ["q_proj", "v_proj"] else table["llama"]
            table.setdefault("interdomain", list(modules))

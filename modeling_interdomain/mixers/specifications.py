"""The names of token mixers in a configuration. `registry.py` puts the classes themselves in place of what they say."""

from .configuration import MixerSpecification
from .inner_function.configuration import InnerFunctionSpecification
from .interdomain.configuration import InterdomainSpecification, S4DSpecification
from .selective_scan.configuration import SelectiveScanSpecification
from .softmax.configuration import SoftmaxSpecification
from .ssd.configuration import SSDSpecification
from .window.configuration import WindowSpecification

TOKEN_MIXERS: dict[str, type[MixerSpecification]] = {
    "interdomain": InterdomainSpecification,
    "s4d": S4DSpecification,
    "softmax": SoftmaxSpecification,
    "ssd": SSDSpecification,
    "selective_scan": SelectiveScanSpecification,
    "inner_function": InnerFunctionSpecification,
    "window": WindowSpecification,
}

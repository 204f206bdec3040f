"""The modules that the library's tests import and its source distribution leaves out.

As a package of its own, this file serves the processes that the distributed tests start: it leads them to the library's
test files as well, and to ours, some of which start processes, too. The pytest process itself uses the package that
conftest.py prepares.
"""

from pathlib import Path

import transformers

__path__.append(str(Path(__file__).parents[4] / ".cache" / f"transformers-{transformers.__version__}" / "tests"))
__path__.append(str(Path(__file__).parents[3]))

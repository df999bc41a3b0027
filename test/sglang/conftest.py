"""Before any test module: Triton looks at this when it is imported, and SGLang imports it."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # test_pools runs SGLang's kernels on a CPU

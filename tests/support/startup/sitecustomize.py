"""What each process that tests start does first: from now on it collects garbage rarely.

By Python's own thresholds a tenth of the processors' time in all tests went into collections, most
of them while torch, transformers or DeepSpeed were imported, which leaves nothing to collect.
"""

import gc

gc.set_threshold(20_000, 50, 100)

"""Types that several rooms share."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Phase = Literal["prefill", "decode"]
CachePolicy = Literal["lru", "decay"]
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

"""One thread for torch here and in every process that a test starts, set before torch is imported: the suite also runs
beside other work, where threads that wait for each other cost minutes. Results do not depend on it."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

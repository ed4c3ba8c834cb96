"""One thread a test process: the models are tiny, and threads that wait for each other cost more than they bring."""

import torch

torch.set_num_threads(1)

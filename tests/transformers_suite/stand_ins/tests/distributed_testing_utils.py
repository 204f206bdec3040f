"""Runs a function in several processes at once, for the tensor-parallel and FSDP tests."""

import multiprocessing
import tempfile

import torch
import torch.distributed as dist
from transformers.testing_utils import torch_device

# The server imports the slow libraries once and the ranks are forked from it, before it has any thread or device.
START_METHOD = "forkserver"
PRELOAD = ["torch", "transformers.testing_utils", "transformers.models.auto.modeling_auto"]


def _get_distributed_device_type():
    return torch_device


def _get_distributed_backend():
    return dist.get_default_backend_for_device(torch_device)


def _get_rank_device(rank):
    return torch.device(torch_device) if torch_device == "cpu" else torch.device(torch_device, rank)


def _set_rank_device(rank):
    if torch_device == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    else:
        torch.accelerator.set_device_index(rank)


def _start_rank_processes(function, args, nprocs):
    multiprocessing.set_forkserver_preload(PRELOAD)
    torch.multiprocessing.start_processes(function, args=args, nprocs=nprocs, start_method=START_METHOD)


def run_distributed(world_size):
    """Returns a function that runs `function(rank, *args)` in `world_size` processes of one process group."""

    def runner(function):
        def run(*args):
            with tempfile.TemporaryDirectory() as folder:
                rendezvous = f"file://{folder}/rendezvous"
                _start_rank_processes(_run_rank, args=(function, args, world_size, rendezvous), nprocs=world_size)

        return run

    return runner


def _run_rank(rank, function, args, world_size, rendezvous):
    _set_rank_device(rank)
    dist.init_process_group(_get_distributed_backend(), init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()

"""The process's place among the others: what the launcher gave, checked against the settings.

The launcher's environment decides (`accelerate launch`, torchrun): nothing of it is one process, several processes are
DDP, ACCELERATE_USE_DEEPSPEED is DeepSpeed. What came of it is stated, and refused where it is not what was asked for.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from lm_pcfg.distributed.collectives import Collectives, ProcessGroup, prepare_cpu
from lm_pcfg.distributed.rendezvous import meet
from lm_pcfg.errors import UserError
from lm_pcfg.settings import Settings

#: Settings that processes need not have in common.
OF_A_HOST = ("device", "threads", "runs_folder", "data.train", "data.valid", "data.index_folder", "data.workers")


class Engine(Collectives):
    """Knows the rank and the device of this process, and does what all processes do together."""

    def __init__(self, settings: Settings):
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device: cuda was asked for, but PyTorch sees no GPU; use device=cpu or device=auto")
        prepare_cpu(settings.threads)
        # Without a GPU Accelerate has to know it, or each of several processes would be rank 0 of 1.
        on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
        launched = "LOCAL_RANK" in os.environ
        self.is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        _check_asked(settings, self.is_deepspeed, launched)
        if self.is_deepspeed:
            _prepare_for_deepspeed(on_cpu)
        if launched:
            _init_process_group(settings, on_cpu)
        # Accumulation and precision are the loop's own, whatever a launcher's environment says: this one would win.
        os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
        self.accelerator = Accelerator(
            cpu=on_cpu and not self.is_deepspeed,
            gradient_accumulation_steps=1,
            mixed_precision="no",
            # What Accelerate assumes of the process group, which is there already.
            kwargs_handlers=[InitProcessGroupKwargs(backend=_backend(settings, on_cpu))] if launched else None,
        )
        device = self.accelerator.device
        super().__init__(
            self.accelerator.process_index,
            self.accelerator.num_processes,
            torch.device("cpu") if device.type == "cpu" else device,  # not cpu:1, which safetensors does not know
        )
        self.zero_stage = self.accelerator.state.deepspeed_plugin.zero_stage if self.is_deepspeed else None
        self.timeout = _collective_timeout(settings)
        self.on_all(lambda: self._check_given(settings))
        given = self.all_gather(_comparable(settings.model_dump(mode="json")))
        self.on_all(lambda: _check_alike(given))
        #: The neighbours with whom this process shares the work on one model; None: it does all of it.
        self.model_group: ProcessGroup | None = None
        if (shards := shard_count(settings.emission.shards, self.world_size)) > 1:
            self.model_group = ProcessGroup.of_neighbours(shards, self.rank, self.world_size, self.timeout)

    @property
    def name(self) -> str:
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO {self.zero_stage}"
        return "DDP" if self.world_size > 1 else "one process"

    def describe(self) -> str:
        """Describe engine, world size and devices; all processes take part."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else f"cpu with {_threads()}"
        places = self.all_gather((socket.gethostname(), name))
        devices = ", ".join(f"{count} x {name}" for name, count in Counter(name for _, name in places).items())
        hosts = len({host for host, _ in places})
        if self.world_size == 1:
            return f"{self.name}, {name}"
        return f"{self.name}, {self.world_size} processes on {hosts} host{'s' * (hosts > 1)}, {devices}"

    def limit_waiting(self) -> None:
        """Set the time limit of the settings for process groups that others made (DeepSpeed's get half an hour)."""
        from torch.distributed import distributed_c10d

        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(self.timeout, group)

    def close_at_exit(self) -> None:
        """Destroy the process group at exit. Call it after success only: after a failure others might not answer."""
        if torch.distributed.is_initialized():
            atexit.register(torch.distributed.destroy_process_group)

    def _check_given(self, settings: Settings) -> None:
        """Check what Accelerate made of it: it falls back silently where its launcher and its environment disagree."""
        if settings.inside.backend == "triton" and self.device.type != "cuda":
            raise UserError("inside.backend: triton needs a GPU, and this process has none; use inside.backend=auto")
        shard_count(settings.emission.shards, self.world_size)
        promised = os.environ.get("WORLD_SIZE", "1")
        if str(self.world_size) != promised:
            raise UserError(
                f"the launcher started {promised} processes (WORLD_SIZE), but each would train alone: Accelerate has "
                f"{self.world_size}; see docs/clusters.md, or unset WORLD_SIZE for one process"
            )
        if self.is_deepspeed != (self.accelerator.distributed_type.value == "DEEPSPEED"):
            actual = self.accelerator.distributed_type.value
            raise UserError(f"the launcher asked for DeepSpeed, but Accelerate has {actual}; see docs/clusters.md")
        wanted = settings.engine.world_size
        if wanted is not None and wanted != self.world_size:
            raise UserError(
                f"engine.world_size: {wanted} processes were asked for, but there {_are(self.world_size)}; "
                "see docs/clusters.md (`accelerate launch --cpu --num_processes 2`, for one, starts a single one)"
            )
        if settings.engine.zero_stage is not None and settings.engine.zero_stage != self.zero_stage:
            raise UserError(f"engine.zero_stage: {settings.engine.zero_stage} was asked for, but this is {self.name}")


def shard_count(asked: int | str, world_size: int) -> int:
    """Return how many processes share the emission's normalisers; "auto": all of them."""
    shards = world_size if asked == "auto" else int(asked)
    if world_size % shards:
        fitting = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise UserError(
            f"emission.shards {shards} does not divide the {world_size} process{'es' * (world_size > 1)} of this run; "
            f"use auto or {'one of ' * (world_size > 1)}{', '.join(map(str, fitting))}"
        )
    return shards


def _comparable(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return settings by their dotted keys, without those that may differ from host to host."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _comparable(value, f"{section}{name}.")
        elif section + name not in OF_A_HOST:
            found[section + name] = value
    return found


def _check_alike(given: list[dict[str, Any]]) -> None:
    """Refuse different settings: such processes would train nonsense, or wait for each other for ever."""
    for rank, values in enumerate(given):
        for key in sorted(given[0].keys() | values.keys()):
            first, here = given[0].get(key), values.get(key)
            if first != here:
                raise UserError(
                    f"process {rank} was started with {key}={here}, process 0 with {key}={first}; "
                    "start all of them by the same command with the same config"
                )


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _threads() -> str:
    count = torch.get_num_threads()
    return "1 thread" if count == 1 else f"{count} threads"


def _check_asked(settings: Settings, is_deepspeed: bool, launched: bool) -> None:
    """Check the settings against the environment, before any process waits for another."""
    given = "deepspeed" if is_deepspeed else "ddp" if os.environ.get("WORLD_SIZE", "1") != "1" else "single"
    if settings.engine.expect not in ("any", given):
        raise UserError(
            f"engine.expect: {settings.engine.expect} was asked for, but the launcher gave {given}; "
            "docs/clusters.md shows how each is launched"
        )
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if not launched and os.environ.get(name, "1") != "1":
            raise UserError(
                f"{name} says that this is one of {os.environ[name]} processes, but LOCAL_RANK does not say which; "
                "use accelerate launch or torchrun, or unset it for one process"
            )
    for other in ("FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{other}", "").lower() == "true":
            raise UserError(f"the launcher asked for {other}, which is not supported; use DDP or DeepSpeed (launch/)")
    if is_deepspeed and not launched:
        raise UserError("ACCELERATE_USE_DEEPSPEED is set, but no launcher started this process; use accelerate launch")
    if is_deepspeed and settings.device == "cpu" and torch.cuda.is_available():
        raise UserError("device: cpu with DeepSpeed needs the GPUs to be hidden: set CUDA_VISIBLE_DEVICES= (empty)")
    if settings.engine.backend == "nccl" and (settings.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("engine.backend: nccl needs GPUs; use engine.backend=auto")


def _backend(settings: Settings, on_cpu: bool) -> str:
    if settings.engine.backend != "auto":
        return settings.engine.backend
    return "gloo" if on_cpu else "nccl"


def _collective_timeout(settings: Settings) -> timedelta:
    """How long a collective may take: somewhat less than asked for, so that a job is gone 30 s after that time.

    torchrun waits 30 s for a worker that does not react; before, this process takes 2 to 8 s to say why, and to end.
    """
    return timedelta(seconds=0.8 * settings.engine.timeout_seconds)


def _init_process_group(settings: Settings, on_cpu: bool) -> None:
    """Set up the process group as Accelerate would, but with the time limit of the settings, and safe from restarts."""
    if torch.distributed.is_initialized():
        return
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():  # processes share a GPU
            os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # or DDP would ask for a GPU of each rank's number
    timeout = _collective_timeout(settings)
    store, rank, world_size = meet(timeout)
    backend = _backend(settings, on_cpu)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _prepare_for_deepspeed(on_cpu: bool) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "false"  # with it Accelerate runs plain DDP and does not say so
    if not on_cpu:
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    # A shared-memory all-reduce for inference, which no training calls: DeepSpeed would compile it for 45 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def peak_memory(device: torch.device) -> str:
    """Return the peak of memory in words, for people."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of GPU memory"
    import resource

    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory"  # Linux counts in KiB

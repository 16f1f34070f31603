"""What a launcher gave is what was asked for, or the run is refused in one line."""

from __future__ import annotations

import math
import os

import pytest
import torch

from lm_pcfg.distributed import collectives, launcher
from lm_pcfg.distributed.collectives import (
    Collectives,
    ProcessGroup,
    lost_contact_reported,
    prepare_cpu,
    seconds_between,
    timestamp,
)
from lm_pcfg.distributed.engine import Engine, _check_alike, _comparable
from lm_pcfg.distributed.throughput import Throughput
from lm_pcfg.distributed.zero import configure
from lm_pcfg.errors import FailedElsewhere, LostContact, UserError
from lm_pcfg.settings import OptimizerSection
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage.run_folder import choose_start
from lm_pcfg.training.signals import StopFlag, StopSignals
from texts import write_config


def engine(folder, *overrides: str) -> Engine:
    return Engine(load_settings(write_config(folder), list(overrides)))


@pytest.mark.parametrize(
    ("overrides", "variables", "message"),
    [
        (["engine.expect=ddp"], {}, "engine.expect: ddp was asked for, but the launcher gave single"),
        (["engine.expect=deepspeed"], {}, "engine.expect: deepspeed was asked for, but the launcher gave single"),
        (["engine.world_size=2"], {}, r"2 processes were asked for, but there is 1; .*--cpu --num_processes 2"),
        (["engine.zero_stage=2"], {}, "engine.zero_stage: 2 was asked for, but this is one process"),
        (["engine.backend=nccl"], {}, "engine.backend: nccl needs GPUs"),
        ([], {"WORLD_SIZE": "2"}, "WORLD_SIZE says that this is one of 2 processes, but LOCAL_RANK does not say which"),
        ([], {"PMI_SIZE": "4"}, "PMI_SIZE says that this is one of 4 processes"),
        ([], {"ACCELERATE_USE_DEEPSPEED": "true"}, "no launcher started this process; use accelerate launch"),
        (["engine.expect=single"], {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "single was asked for, .* gave ddp"),
        (
            ["engine.expect=ddp"],
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true"},
            "ddp was asked for, but the launcher gave deepspeed",
        ),
    ],
)
def test_what_was_not_asked_for_is_refused(tmp_path, monkeypatch, overrides, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        engine(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "process 1 was started with seed=1, process 0 with seed=0; start all of them by the same command"),
        (["emission.shards=2"], "emission.shards=2, process 0 with emission.shards=auto"),
        (["model.state_dropout=0.5"], "model.state_dropout=0.5, process 0 with model.state_dropout=0.0"),
        (["threads=7", "data.workers=2", "data.index_folder=elsewhere"], None),
    ],
)
def test_processes_with_different_settings_are_refused(tmp_path, overrides, message):
    config = write_config(tmp_path)
    given = [_comparable(load_settings(config, changes).model_dump(mode="json")) for changes in ([], overrides)]
    if message is None:
        _check_alike(given)
    else:
        with pytest.raises(UserError, match=message):
            _check_alike(given)


def test_one_process_says_so(tmp_path):
    assert (
        engine(tmp_path, "engine.expect=single", "engine.world_size=1").describe() == "one process, cpu with 1 thread"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "bf16 would round the weights"),
        ({"zero_optimization": {"stage": 0}}, "DeepSpeed without ZeRO"),
        ({"communication_data_type": "bf16", "zero_optimization": {"stage": 2}}, "communication_data_type: bf16 would"),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 1}},
            "grad_accum_dtype: fp16 would",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param is not supported"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "offload_optimizer is not"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "fp16 would round the weights"),
        ({"scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 2}}, "scheduler is set by the settings"),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}, "optimizer is set by the settings"),
        ({}, "DeepSpeed without ZeRO"),
        ({"zero_optimization": {"stage": 4}}, "DeepSpeed without ZeRO"),
        *(
            ({"zero_optimization": {"stage": 3, name: value}}, f"DeepSpeed's {name} is not supported")
            for name, value in {
                "mics_shard_size": 2, "zero_hpz_partition_size": 2, "zero_quantized_weights": True,
                "zero_quantized_nontrainable_weights": True, "zero_quantized_gradients": True, "cpu_offload": True,
                "cpu_offload_param": True, "round_robin_gradients": True,
            }.items()
        ),
    ],
)  # fmt: skip
def test_deepspeed_settings_that_would_change_the_result_are_refused(tmp_path, config, message):
    with pytest.raises(UserError, match=message):
        configure(config, load_settings(write_config(tmp_path), []).optimizer)


def test_deepspeed_is_told_what_the_loop_decides(tmp_path):
    for clip, expected in (("null", 0.0), ("0.25", 0.25)):
        config = {
            "zero_optimization": {"stage": 2, "compute_grad_norm": False, "offload_param": {"device": "none"}},
            "gradient_clipping": "auto", "gradient_accumulation_steps": 4, "train_batch_size": 64,
            "bf16": {"enabled": False}, "communication_data_type": "fp32", "timers": {"other": 1},
        }  # fmt: skip
        configure(config, load_settings(write_config(tmp_path), [f"optimizer.clip={clip}"]).optimizer)
        assert config.pop("train_micro_batch_size_per_gpu") > 0
        assert config == {
            "zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}, "gradient_clipping": expected,
            "gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "communication_data_type": "fp32",
            "steps_per_print": math.inf, "timers": {"other": 1, "throughput": {"enabled": False}},
        }  # fmt: skip
    off = {"mics_shard_size": -1, "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "cpu_offload": False}
    configure({"zero_optimization": {"stage": 3, **off}}, load_settings(write_config(tmp_path), []).optimizer)


def test_null_in_deepspeeds_settings_is_as_if_it_were_not_there(tmp_path):
    zero = {"stage": 2, "offload_optimizer": None, "round_robin_gradients": None}
    config = {"bf16": None, "optimizer": None, "zero_optimization": zero}
    configure(config, load_settings(write_config(tmp_path), []).optimizer)
    assert zero == {"stage": 2}


def test_workers_that_a_launcher_restarts_go_on_with_their_own_run(tmp_path, monkeypatch):
    from lm_pcfg.training import loop

    settings = load_settings(write_config(tmp_path), ["training.max_steps=2"])
    first, second, third = (loop.train(settings) for _ in range(3))
    assert [first.name, second.name, third.name] == ["small", "small-2", "small-3"]
    assert choose_start(settings, launcher.identity()).folder.name == "small-4"
    for other in (first, third):  # of other launchers
        (other / ".lock").write_text("elsewhere 1 2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start = choose_start(settings, launcher.identity())
    assert (start.folder, start.find_checkpoint(print).name) == (second, "step-00000002")
    again = load_settings(tmp_path / "small.yaml", ["resume=auto"])
    assert choose_start(again, launcher.identity()).folder == first  # `auto` names the run itself


class TwoProcesses(Collectives):
    """The second of two; `said` is what the first one broadcasts."""

    def __init__(self, said, rank: int = 1):
        super().__init__(rank, 2, None)
        self.said = said

    def broadcast(self, value):
        return self.said

    def all_gather(self, value):
        return [value, self.said]


def test_a_failure_of_the_main_process_ends_the_others_quietly():
    with pytest.raises(FailedElsewhere):
        TwoProcesses((None, True)).on_main(lambda: 1)
    assert TwoProcesses((5, False)).on_main(lambda: 1) == 5


def test_other_errors_are_not_taken_for_lost_contact():
    with pytest.raises(RuntimeError, match="a bug"), lost_contact_reported():
        raise RuntimeError("a bug: Connection reset by peer")  # one process has no others to lose


def test_a_store_that_died_with_its_launcher(monkeypatch):
    """Work that each process does alone is left, so that all come to save; anything else is one line."""
    error = torch.distributed.DistNetworkError("Failed to recv, got 0 bytes. Did the remote server shutdown or crash?")

    class Dead:
        def check(self, keys):
            raise error

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", Dead)
    assert StopFlag(StopSignals(), TwoProcesses(0)).is_set()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LostContact, match="Failed to recv"), lost_contact_reported():
        Dead().check([])


def test_throughput_of_two_processes():
    """The second computes twice as long; the first waits for it."""
    own = Throughput(steps=10, words=1000.0, sentences=50.0, data=1.0, communication=4.0, total=10.0)
    metrics = own.metrics(TwoProcesses((500.0, 30.0, 0.0, 10.0, 0.0), rank=0))
    assert metrics["train/words_per_second"] == 150.0
    assert metrics["train/sentences_per_second"] == 8.0
    assert metrics["ranks/words_per_second"] == [100.0, 50.0]
    assert metrics["ranks/compute"] == [0.5, 1.0]
    assert metrics["ranks/communication"] == [0.4, 0.0]
    assert metrics["time/data"] == 0.05
    assert metrics["time/straggler_ratio"] == pytest.approx(10 / 7.5)
    assert Throughput().metrics(TwoProcesses(None)) == {}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_sums_over_processes(monkeypatch, processes):
    """All of them give the same numbers here."""
    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: calls.append(tensor.mul_(processes)))
    own = Collectives(0, processes, torch.device("cpu"))
    assert own.sums([0.1, 2.0]) == [processes * 0.1, processes * 2.0]
    assert len(calls) == (processes > 1)
    tensor = torch.ones(2)
    assert own.all_reduce(tensor) is tensor
    assert tensor.tolist() == [processes] * 2
    assert len(calls) == 2 * (processes > 1)
    assert (own.waited > 0) == (processes > 1)


def test_groups_of_neighbours(monkeypatch):
    """All processes make all groups, and each is in one."""
    made = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: made.append(ranks) or (ranks, timeout))
    groups = [ProcessGroup.of_neighbours(2, rank, 6, timeout=9) for rank in range(6)]
    assert made == [[0, 1], [2, 3], [4, 5]] * 6
    assert [(group.rank, group.size) for group in groups] == [(0, 2), (1, 2)] * 3
    assert [group._handle for group in groups[2:4]] == [([2, 3], 9)] * 2
    with pytest.raises(ValueError, match="groups of 4 do not divide 6 processes"):
        ProcessGroup.of_neighbours(4, 0, 6)


def test_what_a_group_exchanges_and_how_long_it_takes(monkeypatch):
    calls = []

    def all_gather(tensors, tensor, group):
        calls.append(group)
        for number, other in enumerate(tensors):
            other.copy_(tensor + number)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: calls.append(group) or tensor.mul_(3))
    group, tensor = ProcessGroup(0, 3, "handle"), torch.ones(2)
    assert [other.tolist() for other in group.all_gather(tensor)] == [[1, 1], [2, 2], [3, 3]]
    assert group.all_reduce(tensor) is tensor
    assert tensor.tolist() == [3, 3]
    assert calls == ["handle"] * 2
    times = iter([1.0, 1.5, 7.0, 9.0])
    monkeypatch.setattr(collectives, "timestamp", lambda device: next(times))
    assert group.take_seconds() > 0.0
    group.all_reduce(tensor)
    group.all_reduce(tensor)
    assert group.take_seconds() == 2.5
    assert group.take_seconds() == 0


def test_values_of_all_processes(monkeypatch):
    def broadcast(box, device):
        box[0] = "of the first"

    def all_gather(values, value):
        values[:] = [value, "others"]

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    alone, two = (Collectives(0, size, torch.device("cpu")) for size in (1, 2))
    assert (alone.broadcast("own"), two.broadcast("own")) == ("own", "of the first")
    assert (alone.all_gather("own"), two.all_gather("own")) == (["own"], ["own", "others"])
    assert [Collectives(rank, 2, torch.device("cpu")).is_main for rank in (0, 1)] == [True, False]
    assert alone.on_main(lambda: 5) == alone.on_all(lambda: 5) == 5
    with pytest.raises(UserError, match="mine"):
        alone.on_main(raising_user_error)


def raising_user_error():
    raise UserError("mine")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[/gloo/pair.cc:12] Connection closed by peer\n [1]. This is"), "Connection closed by peer [1]"),
        (OSError("Broken pipe"), "Broken pipe"),
        (RuntimeError("NCCL " + 300 * "x"), "NCCL " + 195 * "x"),
        (RuntimeError("a bug"), None),
        (torch.OutOfMemoryError("NCCL: out of memory"), None),
        (KeyError("NCCL"), None),
    ],
)  # fmt: skip
def test_only_lost_contact_is_told_as_such(monkeypatch, error, told):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(type(error) if told is None else LostContact) as caught, lost_contact_reported():
        raise error
    if told is not None:
        assert str(caught.value).endswith(f"look for its error ({told})")


def test_seconds_on_a_device(monkeypatch):
    class Event:
        """As those of CUDA: milliseconds, and none unless they were asked for."""

        def __init__(self, enable_timing=False):
            self.enable_timing = enable_timing

        def record(self):
            self.at = next(moments)

        def elapsed_time(self, later):
            assert self.enable_timing
            assert later.enable_timing
            return later.at - self.at

    moments = iter([100.0, 350.0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    began, ended = (timestamp(torch.device("cuda")) for _ in range(2))
    assert seconds_between(began, ended) == 0.25
    assert seconds_between(1.5, 2.0) == 0.5


@pytest.mark.parametrize(("fails", "rank", "told"), [
    ([True, False], 0, "mine"), ([True, True], 0, "mine"), ([True, True], 1, "another process"),
    ([False, True], 0, "another process"), ([False, True], 1, "mine"),
])  # fmt: skip
def test_of_the_processes_that_fail_the_first_says_why(monkeypatch, fails, rank, told):
    def action():
        if fails[rank]:
            raise UserError("mine")

    own = Collectives(rank, 2, torch.device("cpu"))
    monkeypatch.setattr(own, "all_gather", lambda value: fails)
    with pytest.raises(UserError if told == "mine" else FailedElsewhere, match=told):
        own.on_all(action)


@pytest.mark.parametrize(("threads", "processes", "expected"), [(3, "2", 3), (None, "2", 4), (None, "99", 1)])
def test_cores_are_shared_out_and_tiny_numbers_become_zero(monkeypatch, threads, processes, expected):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8 if pid == 0 else 1)))  # 0: this process
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    prepare_cpu(threads)
    assert calls == [expected]
    assert torch.tensor([1e-39]).mul(1.0).item() == 0.0  # the fixture in conftest.py sets it back


@pytest.mark.parametrize(("cores", "processes", "expected"), [(6, "2", 3), (1, "2", 1), (None, "2", 1), (None, "1", 1)])
def test_cores_where_the_system_does_not_tell_which(monkeypatch, cores, processes, expected):
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    prepare_cpu()
    assert calls == [expected]


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("mics_shard_size", -1, 1),
        ("zero_hpz_partition_size", 1, 2),
        ("zero_quantized_weights", False, True),
        ("zero_quantized_nontrainable_weights", False, True),
        ("zero_quantized_gradients", False, True),
        ("cpu_offload", False, True),
        ("cpu_offload_param", False, True),
        ("round_robin_gradients", False, True),
    ],
)
def test_what_deepspeed_may_not_do_can_be_named_if_it_is_off(name, off, on):
    configure({"zero_optimization": {"stage": 2, name: off}}, OptimizerSection())
    with pytest.raises(UserError, match=f"DeepSpeed's {name} is not supported"):
        configure({"zero_optimization": {"stage": 2, name: on}}, OptimizerSection())

"""Save and resume on every rank is equal in bits to not having stopped."""

from __future__ import annotations

import io

import pytest
import torch
from tests.hook.models import batch, digest, everything, make, train

import commkern as ck

STOCHASTIC = "quantize:bits=4,rounding=stochastic"


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def resume(rank, world_size, spec):
    ddp = make()
    state = ck.register(ddp, spec, seed=5)
    train(ddp, rank, range(3))
    saved = through_a_file(
        {"hook": state.state_dict(), "model": ddp.module.state_dict()}
    )
    train(ddp, rank, range(3, 6))

    again = make(seed=99)
    again.module.load_state_dict(saved["model"])
    restored = ck.register(again, spec, seed=5)
    restored.load_state_dict(saved["hook"])
    train(again, rank, range(3, 6))
    return digest(ddp), digest(again), restored.step


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_resume_is_equal_in_bits(ranks, world_size):
    for spec in everything():
        for straight, resumed, step in ranks.run(world_size, resume, spec):
            assert straight == resumed, spec
            assert step == 6


class Run:
    """A training run with all that has state: model, scaler, schedule, hook."""

    def __init__(self, spec, *, layout=None, half=False, scaled=False, **settings):
        dtype = torch.float16 if half else torch.float32
        self.ddp = make(dtype=dtype, **(layout or {}))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=256.0, growth_interval=2, enabled=scaled
        )
        self.dtype, self.scaled = dtype, scaled
        rate = settings.pop("learning_rate", False)
        self.state = ck.register(
            self.ddp,
            spec,
            grad_scaler=self.scaler if scaled else None,
            learning_rate=self.schedule_rate if rate else None,
            **settings,
        )

    def schedule_rate(self):
        return self.optimizer.param_groups[0]["lr"]

    def parts(self):
        parts = {"model": self.ddp.module, "schedule": self.schedule}
        parts |= {"optimizer": self.optimizer, "hook": self.state}
        return parts | ({"scaler": self.scaler} if self.scaled else {})

    def save(self):
        return through_a_file({k: v.state_dict() for k, v in self.parts().items()})

    def load(self, saved):
        for key, part in self.parts().items():
            part.load_state_dict(saved[key])

    def train(self, rank, steps):
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.ddp(batch(rank, step).to(self.dtype)).float().square().mean()
            if self.scaled and step == 4 and rank == 0:
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            if self.dtype == torch.float16:
                self.optimizer.step()  # GradScaler refuses fp16 gradients
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.schedule.step()


VARIANTS = {
    "one version": {"rollback": False},
    "half": {"half": True},
    "loss scale": {"scaled": True},
    "learning rate": {"learning_rate": True},
    "ledger": {"ledger": True},
    "everything compressed": {"exempt": None, "nonfinite": "saturate"},
}
LAYOUTS = {
    "same": {},
    "other": {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True},
    "static": {"bucket_cap_mb": 25, "static_graph": True},
}


def resume_variant(rank, world_size, spec, variant, layout):
    straight = Run(spec, **variant)
    straight.train(rank, range(3))
    saved = straight.save()
    straight.train(rank, range(3, 7))
    resumed = Run(spec, layout=layout, **variant)
    resumed.load(saved)
    resumed.train(rank, range(3, 7))
    if "ledger" in variant:
        assert max(resumed.state.check_ledger().values()) < 1e-5
    ends = [run.save()["hook"] for run in (straight, resumed)]
    return digest(straight.ddp), digest(resumed.ddp), ends


def same(a, b):
    """Equal in type and value, tensors in bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("spec", [STOCHASTIC, "fixed_point:bits=8", "sign"])
def test_resume_of_settings(ranks, spec, variant):
    results = ranks.run(2, resume_variant, spec, variant, LAYOUTS["same"])
    for straight, resumed, (state, again) in results:
        assert straight == resumed
        assert same(state, again)
        assert state["step"] == 7


@pytest.mark.parametrize("layout", ["other", "static"])
def test_resume_in_another_bucket_layout(ranks, layout):
    for spec in (STOCHASTIC, "fixed_point:bits=8,rounding=stochastic"):
        results = ranks.run(3, resume_variant, spec, {}, LAYOUTS[layout])
        for straight, resumed, (state, again) in results:
            assert straight == resumed
            assert same(state, again)


def resume_after_the_start(rank, world_size):
    ddp = make()
    state = ck.register(ddp, "quantize:bits=8", start_step=3)
    train(ddp, rank, range(5))
    compressed = state.stats()["bytes_sent"]
    again = make(seed=99)
    restored = ck.register(again, "quantize:bits=8", start_step=3)
    train(again, rank, range(1))
    dense = restored.stats()["bytes_sent"]
    restored.load_state_dict(through_a_file(state.state_dict()))
    train(again, rank, range(5, 6))
    return compressed, dense, restored.stats()["bytes_sent"], restored.step


def test_the_dense_start_is_not_repeated(ranks):
    for compressed, dense, sent, step in ranks.run(2, resume_after_the_start):
        assert sent < 0.4 * dense
        assert sent == compressed
        assert step == 6

"""Callbacks: they wrap the model once, keep every bit, write the report, and refuse what they cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import InvalidBudgetError, InvalidOptionError, UnknownPlannerError
from lowtide.integrations.apply import ModelWatch, WrapOptions


class Net(nn.Module):
    """A few layers that compute their own loss, with dropout: bits differ if random numbers do."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(64, 32), "labels": torch.randn(64, 32)} for _ in range(64)]


def import_beside_cpu_torch(name: str) -> Any:
    from zoo import prepare_torchvision

    prepare_torchvision()
    return pytest.importorskip(name)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidBudgetError),
        ({"budget": "50 apples"}, InvalidBudgetError),
        ({"budget": "50%", "planner": "magic"}, UnknownPlannerError),
        ({"budget": "50%", "costs": "guessed"}, InvalidOptionError),
        ({"budget": "50%", "report": "plan.pdf"}, InvalidOptionError),
    ],
)
def test_bad_options_are_refused_before_training_begins(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        WrapOptions(**options)


def test_model_is_wrapped_once_and_reported_after_the_first_step(tmp_path: Path) -> None:
    watch = ModelWatch(budget="60%", costs="analytic", report=tmp_path / "plan.txt")
    assert watch.plans == []
    model = net()
    watch.begin(model)
    watch.step_ended()
    assert not (tmp_path / "plan.txt").exists()
    model(torch.randn(16, 64, 32), torch.randn(16, 64, 32))["loss"].backward()
    watch.step_ended()
    (plan,) = watch.plans
    assert str(plan) in (tmp_path / "plan.txt").read_text()
    watch.begin(model)
    assert watch.plans == [plan], "beginning again must not throw plans away"


@pytest.mark.slow
def test_trainer_gives_the_same_bits_in_less_memory(tmp_path: Path) -> None:
    transformers = import_beside_cpu_torch("transformers")
    pytest.importorskip("accelerate")
    from lowtide.integrations.transformers import LowtideCallback

    callback = LowtideCallback(budget="60%", costs="analytic", report=tmp_path / "plan.html")

    def trained(*callbacks: Any) -> tuple[dict[str, Tensor], float]:
        options = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(net(), options, train_dataset=batches(), callbacks=list(callbacks))
        torch.manual_seed(2)
        loss = trainer.train().training_loss
        return trainer.model.state_dict(), loss

    plain, planned = trained(), trained(callback)
    assert plain[1] == planned[1]
    assert all(torch.equal(plain[0][name], planned[0][name]) for name in plain[0])
    assert all(not torch.equal(plain[0][name], value) for name, value in net().state_dict().items())
    assert callback.plans
    assert callback.plans[0].num_recomputed
    assert (tmp_path / "plan.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient_checkpointing", "torch_compile"])
def test_trainer_options_that_do_the_same_are_refused(tmp_path: Path, name: str) -> None:
    import_beside_cpu_torch("transformers")
    from types import SimpleNamespace

    from lowtide.integrations.transformers import LowtideCallback

    options = SimpleNamespace(**({"gradient_checkpointing": False, "torch_compile": False} | {name: True}))
    with pytest.raises(InvalidOptionError, match=name):
        LowtideCallback(budget="50%").on_train_begin(options, None, None, model=net())


@pytest.mark.slow
def test_lightning_gives_the_same_bits_in_less_memory(tmp_path: Path) -> None:
    import_beside_cpu_torch("lightning")
    from lowtide.integrations.lightning import LowtideCallback

    callback = LowtideCallback(budget="60%", module="net", costs="analytic", report=tmp_path / "plan.html")
    plain, planned = lightning_trained(), lightning_trained(callback)
    assert all(torch.equal(plain[name], planned[name]) for name in plain)
    assert callback.plans[0].num_recomputed
    assert (tmp_path / "plan.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("module", "words"), [("nets", "has no submodule 'nets'"), ("", "without a call")])
def test_lightning_says_what_it_cannot_plan(module: str, words: str) -> None:
    import_beside_cpu_torch("lightning")
    from lowtide.integrations.lightning import LowtideCallback

    with pytest.raises(InvalidOptionError, match=words):
        lightning_trained(LowtideCallback(budget="60%", module=module, costs="analytic"))


def lightning_trained(*callbacks: Any) -> dict[str, Tensor]:
    """Return the parameters after an epoch; `training_step` calls the submodule `net`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(batch["x"], batch["labels"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    torch.manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=16))
    return module.state_dict()


def test_a_wrapped_model_can_be_unwrapped_after_training() -> None:
    watch = ModelWatch(budget="60%", costs="analytic")
    model = net()
    watch.begin(model)
    lowtide.unwrap(model)
    assert model._compiled_call_impl is None

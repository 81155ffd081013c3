"""What a launcher starts in every process: a framework's loop, plain and planned, which must leave the same bits.

Run as a script, with the name of a loop; every process says that it is done.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide

ROWS, DIM, BUDGET, STEPS = 256, 160, "75%", 3
OPTIONS: dict[str, Any] = {"budget": BUDGET, "planner": "greedy", "costs": "analytic"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    """More than 1 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(self.head(x), labels)}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(DIM), "labels": torch.randn(8)} for _ in range(2 * STEPS * ROWS)]


def loader(data: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=ROWS)


def local(model: nn.Module) -> list[Tensor]:
    return [each.to_local() if hasattr(each, "to_local") else each.detach() for each in model.parameters()]


def with_accelerate(planned: bool) -> nn.Module:  # DDP or FSDP2, as it was launched
    from accelerate import Accelerator

    model = lowtide.wrap(net(), **OPTIONS) if planned else net()
    accelerator = Accelerator(cpu=True)
    trained, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(rows()))
    torch.manual_seed(10 + accelerator.process_index)
    for batch in data:
        accelerator.backward(trained(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return trained


def with_trainer(planned: bool) -> nn.Module:
    import transformers

    from lowtide.integrations.transformers import LowtideCallback

    options = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [LowtideCallback(**OPTIONS)] if planned else []
    trainer = transformers.Trainer(net(), options, train_dataset=rows(), callbacks=callbacks)
    torch.manual_seed(10 + trainer.args.process_index)
    trainer.train()
    return trainer.model


def with_lightning(planned: bool, *, sharded: bool = False) -> nn.Module:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from lowtide.integrations.lightning import LowtideCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_model(self) -> None:
            if sharded:
                for layer in self.net.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if not index:
                torch.manual_seed(10 + dist.get_rank())
            return self.net(batch["x"], batch["labels"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "ddp",
        callbacks=[LowtideCallback(**OPTIONS, module="net")] if planned else [],
        **quiet,
    )
    module = Module()
    trainer.fit(module, loader(rows()))
    return module.net


LOOPS: dict[str, Callable[[bool], nn.Module]] = {
    "accelerate": with_accelerate,
    "trainer": with_trainer,
    "lightning": with_lightning,
    "lightning-fsdp2": lambda planned: with_lightning(planned, sharded=True),
}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from zoo import prepare_torchvision

    # Beside a CPU build of torch, torchvision's wheel imports only after its ops have been declared.
    prepare_torchvision()
    torch.set_num_threads(1)
    run = LOOPS[sys.argv[1]]
    plain, planned = run(False), run(True)
    assert all(map(torch.equal, local(plain), local(planned))), "other bits"
    assert not any(map(torch.equal, local(plain), [each.detach() for each in net().parameters()])), "nothing trained"
    found = lowtide.plans(planned.module if hasattr(planned, "module") else planned)
    assert any(plan.num_recomputed for plan in found), "nothing recomputed"
    engine = "fsdp2" if any(hasattr(each, "to_local") for each in planned.parameters()) else "replica"
    assert dist.is_initialized(), "one process alone"
    assert dist.get_world_size() == 2, "one process alone"
    print(f"rank {os.environ.get('RANK', '0')}: same bits with {engine}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The peers' loops for step_overhead.py, each as bare as its options allow; seconds of training alone."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Peer = Callable[[Callable[[], nn.Module], TensorDataset, int, int, str], float]


def ignite(model: Callable[[], nn.Module], data: TensorDataset, epochs: int, batch: int, device: str) -> float:
    from ignite.engine import create_supervised_trainer

    network = model().to(device)
    engine = create_supervised_trainer(
        network, torch.optim.Adam(network.parameters(), lr=1e-3), nn.CrossEntropyLoss(), device=device
    )
    started = time.perf_counter()
    engine.run(DataLoader(data, batch_size=batch, shuffle=True), max_epochs=epochs)
    return time.perf_counter() - started


def skorch(model: Callable[[], nn.Module], data: TensorDataset, epochs: int, batch: int, device: str) -> float:
    from skorch import NeuralNet

    network = model()
    net = NeuralNet(
        network,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=epochs,
        batch_size=batch,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
        callbacks=None,
        device=device,
    ).initialize()
    inputs, targets = (tensor.numpy() for tensor in data.tensors)
    started = time.perf_counter()
    net.partial_fit(inputs, targets)
    return time.perf_counter() - started


def lightning(model: Callable[[], nn.Module], data: TensorDataset, epochs: int, batch: int, device: str) -> float:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss = model(), nn.CrossEntropyLoss()

        def training_step(self, rows: Any, index: int) -> torch.Tensor:  # noqa: ARG002
            inputs, targets = rows
            return self.loss(self.network(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="gpu" if device.startswith("cuda") else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Module(), DataLoader(data, batch_size=batch, shuffle=True)
    started = time.perf_counter()
    trainer.fit(module, loader)
    return time.perf_counter() - started


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, targets = self._data[index]
        return {"inputs": inputs, "labels": targets}


class _WithLoss(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, nn.CrossEntropyLoss()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.network(inputs)
        return {"loss": self.loss(outputs, labels), "logits": outputs}


def hugging_face(
    model: Callable[[], nn.Module], data: TensorDataset, epochs: int, batch: int, device: str
) -> float:
    from transformers import Trainer, TrainingArguments

    network = _WithLoss(model())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not device.startswith("cuda"),
            max_grad_norm=0.0,
        )
        trainer = Trainer(
            network,
            arguments,
            train_dataset=_Rows(data),
            optimizers=(torch.optim.Adam(network.parameters(), lr=1e-3), None),
        )
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started


#: By name: the package that must be there, and the loop.
PEERS: dict[str, tuple[str, Peer]] = {
    "Ignite": ("ignite", ignite),
    "skorch": ("skorch", skorch),
    "Lightning": ("lightning", lightning),
    "HF Trainer": ("transformers", hugging_face),
}

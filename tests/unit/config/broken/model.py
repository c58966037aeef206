"""What the broken study files name; this is not broken."""

from torch import nn

SIZE = 4


class Net(nn.Module):
    """A network of two layers."""

    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, inputs):
        return self.layers(inputs)


def mae(outputs, targets):
    return (outputs - targets).abs().mean()


def alone(outputs):
    return outputs.mean()

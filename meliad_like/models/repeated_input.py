"""The layer of the reference's dense memory, whose input counts twice (google-research/meliad, `memory2/`)."""

from meliad_like.models.layer import LAYERS, DecoderLayer, LayerConfig


class RepeatedInputLayer(DecoderLayer):
    """A standard layer whose input is added to its output once more."""

    def _read(self, x, carry, dropout_key, read):
        y, carry = super()._read(x, carry, dropout_key, read)
        return x + y, carry


@LAYERS.register("repeated_input")
class RepeatedInput(LayerConfig):
    """Layers whose input is added to their output once more, as that with the reference's dense memory."""

    def build(self, shape, index, *, rngs):
        return RepeatedInputLayer(shape, index, rngs=rngs)

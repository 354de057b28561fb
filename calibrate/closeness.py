"""How close the vectors of two encoders are: the cosine, text by text, which measures the cost of FP8."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity

GOAL = 0.999  # median below which a report names options that lose less


@dataclass(frozen=True)
class Closeness:
    """Cosine of the vectors of the same text by two models."""

    texts: int
    median: float
    fifth: float  # percentile
    least: float
    mean: float

    @classmethod
    def of(cls, one: Tensor, other: Tensor) -> "Closeness":
        """Both [texts, dimensions]."""
        cosines = cosine_similarity(one.double(), other.double()).clamp(-1, 1)
        return cls(
            len(cosines),
            float(cosines.median()),
            float(cosines.quantile(0.05)),
            float(cosines.min()),
            float(cosines.mean()),
        )

    def text(self) -> str:
        return f"Cosine to BF16 {self.median:.5f} in the median of {self.texts} texts, {self.least:.5f} at least."

"""Modules around a model whose forward computes no loss from tensors: the few lines that its user writes."""

from typing import Any

from torch import Tensor, nn


class MeanSquare(nn.Module):
    """The mean square of the features of an encoder, or the sum of those of a backbone's feature maps."""

    def __init__(self, model: nn.Module, output: str, argument: str) -> None:
        super().__init__()
        self.model, self.output, self.argument = model, output, argument


class TextMeanSquare(MeanSquare):
    """For tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return _mean_square(getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), self.output))


class ImageMeanSquare(MeanSquare):
    """For images and videos."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return _mean_square(getattr(self.model(**{self.argument: pixel_values}), self.output))


class Contrastive(nn.Module):
    """The loss that a model of images and texts computes if it is asked to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss


class Detection(nn.Module):
    """A detector, whose labels are a dictionary for each image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, class_labels: Tensor, boxes: Tensor) -> Any:
        pairs = zip(class_labels, boxes, strict=True)
        return self.model(pixel_values, labels=[{"class_labels": c, "boxes": b} for c, b in pairs]).loss


class Segmentation(nn.Module):
    """A segmenter of objects, whose labels are lists."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, class_labels: Tensor, mask_labels: Tensor) -> Any:
        classes, masks = list(class_labels), list(mask_labels)
        return self.model(pixel_values, class_labels=classes, mask_labels=masks).loss


class PromptedMasks(nn.Module):
    """A segmenter of the objects at points. Its masks and their scores become large and small."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, input_points: Tensor, input_labels: Tensor) -> Tensor:
        output = self.model(pixel_values=pixel_values, input_points=input_points, input_labels=input_labels)
        return _mean_square([output.pred_masks, output.iou_scores])


def with_loss(task: str, model: Any) -> Any:
    """``model``, in a module with a loss where its forward of tensors has none."""
    if task == "text-encoding":
        return TextMeanSquare(model, "last_hidden_state", "input_ids")
    if task in _IMAGE_OUTPUTS:
        return ImageMeanSquare(model, _IMAGE_OUTPUTS[task], model.main_input_name)
    wrapper = _WRAPPERS.get(task)
    return model if wrapper is None else wrapper(model)


def _mean_square(features: Any) -> Tensor:
    maps = features if isinstance(features, tuple | list) else [features]
    loss: Tensor = sum(one.float().pow(2).mean() for one in maps)
    return loss


_IMAGE_OUTPUTS = {
    "backbone": "feature_maps",
    "image-encoding": "last_hidden_state",
    "depth-estimation": "predicted_depth",
    "image-to-image": "reconstruction",
    "pose-estimation": "heatmaps",
    "normal-estimation": "normals",
    "pointmap-estimation": "pointmaps",
    "image-matting": "alphas",
    "text-recognition": "last_hidden_state",
}
_WRAPPERS = {
    "zero-shot-image-classification": Contrastive,
    "object-detection": Detection,
    "universal-segmentation": Segmentation,
    "mask-generation": PromptedMasks,
}

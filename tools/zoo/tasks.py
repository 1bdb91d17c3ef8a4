"""The tasks of the sweeps: auto mappings of transformers that name a model with a head."""

from typing import NamedTuple


class Task(NamedTuple):
    """One auto mapping.

    Attributes:
        mapping: its name in ``transformers.models.auto.modeling_auto``.
        kind: of its inputs, a module of ``tools.zoo.inputs``.
        thorough: cut into two and four stages, in train and eval mode, on three shapes. Other tasks are cut into
            three, in train mode, on two shapes.
    """

    mapping: str
    kind: str
    thorough: bool = False


# A class that several mappings name is compared in the first of them only.
TASKS = {
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING", "text", thorough=True),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING", "text", thorough=True),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "text", thorough=True),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "images", thorough=True),
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "text"),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "text"),
    "question-answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING", "text"),
    "multiple-choice": Task("MODEL_FOR_MULTIPLE_CHOICE_MAPPING", "text"),
    "next-sentence": Task("MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING", "text"),
    "image-text-to-text": Task("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "image_text"),
    "pretraining": Task("MODEL_FOR_PRETRAINING_MAPPING", "text"),
    "text-encoding": Task("MODEL_FOR_TEXT_ENCODING_MAPPING", "text"),
    "speech-seq2seq": Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "speech"),
    "ctc": Task("MODEL_FOR_CTC_MAPPING", "speech"),
    "rnnt": Task("MODEL_FOR_RNNT_MAPPING", "speech"),
    "tdt": Task("MODEL_FOR_TDT_MAPPING", "speech"),
    "text-to-spectrogram": Task("MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING", "spoken"),
    "text-to-waveform": Task("MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING", "spoken"),
    "audio-classification": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "speech"),
    "audio-frame-classification": Task("MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING", "speech"),
    "audio-xvector": Task("MODEL_FOR_AUDIO_XVECTOR_MAPPING", "speech"),
    "visual-question-answering": Task("MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING", "image_text"),
    "document-question-answering": Task("MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING", "text"),
    "table-question-answering": Task("MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING", "text"),
    "zero-shot-image-classification": Task("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING", "image_text"),
    "semantic-segmentation": Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", "images"),
    "universal-segmentation": Task("MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING", "images"),
    "object-detection": Task("MODEL_FOR_OBJECT_DETECTION_MAPPING", "images"),
    "depth-estimation": Task("MODEL_FOR_DEPTH_ESTIMATION_MAPPING", "images"),
    "masked-image-modeling": Task("MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING", "images"),
    "image-to-image": Task("MODEL_FOR_IMAGE_TO_IMAGE_MAPPING", "images"),
    "backbone": Task("MODEL_FOR_BACKBONE_MAPPING", "images"),
    "causal-image-modeling": Task("MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING", "images"),
    "pose-estimation": Task("MODEL_FOR_POSE_ESTIMATION_MAPPING", "images"),
    "normal-estimation": Task("MODEL_FOR_NORMAL_ESTIMATION_MAPPING", "images"),
    "pointmap-estimation": Task("MODEL_FOR_POINTMAP_ESTIMATION_MAPPING", "images"),
    "image-matting": Task("MODEL_FOR_IMAGE_MATTING_MAPPING", "images"),
    "text-recognition": Task("MODEL_FOR_TEXT_RECOGNITION_MAPPING", "images"),
    "table-recognition": Task("MODEL_FOR_TABLE_RECOGNITION_MAPPING", "images"),
    "keypoint-detection": Task("MODEL_FOR_KEYPOINT_DETECTION_MAPPING", "images"),
    "keypoint-matching": Task("MODEL_FOR_KEYPOINT_MATCHING_MAPPING", "images"),
    "mask-generation": Task("MODEL_FOR_MASK_GENERATION_MAPPING", "prompts"),
    "image-encoding": Task("MODEL_FOR_IMAGE_MAPPING", "images"),
    "video-classification": Task("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING", "images"),
    "time-series-classification": Task("MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING", "time_series"),
    "time-series-regression": Task("MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING", "time_series"),
    "time-series-prediction": Task("MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING", "time_series"),
}

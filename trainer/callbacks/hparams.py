"""Makes the summaries for TensorBoard's HParams tab: the start and the end of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def session_start(hparams: Mapping[str, Any], at: float) -> Any:
    """The summary of a session's start, with its parameters.

    Args:
        hparams: The parameters by name; a value that is no number, boolean or text is converted to text.
        at: When it started, in seconds since 1970.
    """
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(start_time_secs=at)
    for name, value in hparams.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = str(value)
    return _summary(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def session_end(at: float, *, success: bool) -> Any:
    """The summary of a session's end.

    Args:
        at: When it ended, in seconds since 1970.
        success: Whether it is shown as a success rather than a failure.
    """
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = api_pb2.STATUS_SUCCESS if success else api_pb2.STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=at)
    return _summary(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def _summary(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR, create_summary_metadata

    metadata = create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=NULL_TENSOR)])

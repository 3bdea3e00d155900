"""A model of Triton's python backend that serves a bundle; `repository` writes the files that make one of it.

import triton_python_backend_utils
from vlmexport.runtime.serving.triton.model import TritonModel

class TritonPythonModel(TritonModel):
    def __init__(self):
        super().__init__(triton_python_backend_utils)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...bundle.folder import Bundle
from ...common.errors import VlmexportError
from ...common.foreign_errors import from_signal_handler
from ...session.session import Session
from ..scheduler import Scheduler
from .config import Parameters
from .delivery import Answer, Delivery
from .request import read_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DRAIN = 10.0
"""Seconds that requests have to end in when the model is unloaded."""


class TritonModel:
    """One instance: a session, its scheduler, and a thread that sends what they give."""

    def __init__(self, triton: Any):
        """`triton`: the module `triton_python_backend_utils`, which exists in Triton's processes alone."""
        self._triton = triton

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle that the configuration names. Raises Triton's `TritonModelException` with one line."""
        try:
            parameters = Parameters.read(args["model_config"])
            bundle = Bundle.open(parameters.bundle)
            max_batch = parameters.max_batch or bundle.manifest.limits.max_batch
            self._session = Session.load(
                bundle, parameters.device, max_batch=max_batch, threads=parameters.threads
            )
            self._scheduler = Scheduler(self._session, parameters.max_waiting)
        except VlmexportError as error:
            raise self._triton.TritonModelException(str(error)) from None
        self._delivery = Delivery()

    def execute(self, requests: Sequence[Any]) -> None:
        """Accept requests, or refuse them; their answers come from other threads."""
        for request in requests:
            answer = Answer(self._triton, request.get_response_sender())
            try:
                self._submit(request, answer)
            except Exception as error:
                if from_signal_handler(error):
                    raise
                answer.refuse(error)

    def finalize(self) -> None:
        """Let requests end, and give the memory back."""
        self._scheduler.close(DRAIN)
        self._delivery.close()
        self._session.close()

    def _submit(self, request: Any, answer: Answer) -> None:
        asked, answer.streamed = read_request(self._triton, request)
        answer.ticket = self._scheduler.submit(asked, partial(self._delivery.push, answer))
        answer.ticket.add_done_callback(lambda _: self._delivery.wake(answer))
        self._delivery.wake(answer)

"""The middleware that enforces the limits of tenants (access/limits.py) on the routes of the scope `generate`.

Handlers find the request's `Visit` in `scope["visit"]`. Every answer has the tenant's bounds in its headers.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve.server.access.limits import Tenants, Visit
from fp8serve.server.access.scopes import generates
from fp8serve.server.faults import Fault
from fp8serve.server.http.scope import refuse


class RateLimits:
    """See the module."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self.app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not generates(scope):
            return await self.app(scope, receive, send)
        visit = self._tenants.visit(scope["caller"], scope["usage"])
        answer = _answer(visit, send)
        try:
            visit.enter()
        except Fault as fault:
            return await refuse(fault, scope, receive, answer, close=True)
        scope["visit"] = visit
        try:
            await self.app(scope, receive, answer)
        finally:
            visit.leave()


def _answer(visit: Visit, send: Send) -> Send:
    """`send` that adds the headers."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            bounds = [(name.encode(), value.encode()) for name, value in visit.headers().items()]
            message = {**message, "headers": [*message.get("headers", []), *bounds]}
        await send(message)

    return sent

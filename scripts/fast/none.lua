-- No fast path: the engine decides about each request.
local fast

-- Dispatch: finds the fast path that decides about a key by its `value`, and by what is `asked`.
-- `found` is the reply, and `write_used` stores what is `used`. HELD is held.lua. QUEUE is
-- token_bucket/queue.lua; other algorithms, and several limits, have none. This text stands in
-- each.lua and in algorithm.lua, in place of DISPATCH.
      write_used = write
      if not holds then
        found, used, a, b, c, d, e = fast(key, value, asked, 0)
      end
-- QUEUE
      if not found and drain and (holds or string.byte(value, -1) == 72) then
        if not fast_held then
-- HELD
        end
        is_denied, write_used = false, write_held
        found, used, a, b, c = fast_held(value, asked)
      end

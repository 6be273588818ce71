-- Queue: decides about the requests to a token bucket of which some wait, or have to. LEAKY is the
-- fast path of the leaky bucket, which is made where the first key needs it. This text stands in
-- each.lua.
-- waits          whether requests wait for the bucket, or one to the key at work has to; a hold,
--                about which held.lua decides, leaves it as it is
-- fast_waiting   decides about such a key, and `write_waiting` stores it
      if waits and not holds then
        if not fast_waiting then
          local usual_fast, usual_write = fast, write
-- LEAKY
          fast_waiting, write_waiting, fast, write = fast, write, usual_fast, usual_write
        end
        is_denied, write_used = false, write_waiting
        found, used, a, b, c, d, e = fast_waiting(key, value, asked)
      end

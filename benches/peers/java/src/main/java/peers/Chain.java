package peers;

import java.util.Arrays;
import java.util.concurrent.CompletableFuture;
import java.util.function.Supplier;
import java.util.stream.LongStream;

/** Requests one after the other. */
final class Chain {
    /** One of so many requests is timed. */
    private static final int SAMPLED = 16;

    private final Subject.Limiter limiter;
    private final Supplier<String> keys;
    private final long most;
    private final long end;
    private final CompletableFuture<Void> done = new CompletableFuture<>();

    private long decisions;
    private long admitted;
    private long[] latencies = new long[64];
    private int timed;

    /** Makes at most so many requests, and none after `end`. */
    Chain(Subject.Limiter limiter, Supplier<String> keys, long most, long end) {
        this.limiter = limiter;
        this.keys = keys;
        this.most = most;
        this.end = end;
    }

    void run() {
        while (decisions < most && (end == Long.MAX_VALUE || System.nanoTime() < end)) {
            var start = System.nanoTime();
            var check = limiter.check(keys.get());
            if (!check.isDone()) {
                check.whenComplete(
                        (allowed, error) -> {
                            if (error != null) {
                                done.completeExceptionally(error);
                            } else {
                                record(allowed, start);
                                run();
                            }
                        });
                return;
            }
            try {
                record(check.join(), start);
            } catch (RuntimeException error) {
                done.completeExceptionally(error);
                return;
            }
        }
        done.complete(null);
    }

    private void record(boolean allowed, long start) {
        if (decisions++ % SAMPLED == 0) {
            if (timed == latencies.length) {
                latencies = Arrays.copyOf(latencies, 2 * timed);
            }
            latencies[timed++] = System.nanoTime() - start;
        }
        admitted += allowed ? 1 : 0;
    }

    void await() throws Exception {
        done.get();
    }

    long decisions() {
        return decisions;
    }

    long admitted() {
        return admitted;
    }

    LongStream latencies() {
        return Arrays.stream(latencies, 0, timed);
    }
}

package peers;

import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import org.redisson.Redisson;
import org.redisson.api.RRateLimiter;
import org.redisson.api.RateType;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** RRateLimiter of Redisson. Each key has a limiter of its own. */
final class RedissonLimiter implements Subject {
    private final RedissonClient client;

    RedissonLimiter(String url) {
        client = connect(url);
    }

    static RedissonClient connect(String url) {
        var config = new Config();
        var database = url.lastIndexOf('/');
        config.useSingleServer()
                .setAddress(url.substring(0, database))
                // A slow machine shows in the figures, and does not end the measurement.
                .setTimeout(30_000)
                .setDatabase(Integer.parseInt(url.substring(database + 1)));
        return Redisson.create(config);
    }

    @Override
    public Limiter limiter(String name, long limit) {
        var limiters = new ConcurrentHashMap<String, CompletableFuture<RRateLimiter>>();
        return key -> {
            var limiter = limiters.computeIfAbsent(key, absent -> create(name + ":" + key, limit));
            return limiter.thenCompose(ready -> ready.tryAcquireAsync(1).toCompletableFuture());
        };
    }

    private CompletableFuture<RRateLimiter> create(String key, long limit) {
        var limiter = client.getRateLimiter(key);
        return limiter.trySetRateAsync(RateType.OVERALL, limit, Duration.ofDays(1))
                .toCompletableFuture()
                .thenApply(set -> limiter);
    }
}

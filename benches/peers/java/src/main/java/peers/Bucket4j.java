package peers;

import io.github.bucket4j.BucketConfiguration;
import io.github.bucket4j.distributed.AsyncBucketProxy;
import io.github.bucket4j.distributed.ExpirationAfterWriteStrategy;
import io.github.bucket4j.distributed.proxy.AsyncProxyManager;
import io.github.bucket4j.distributed.proxy.optimization.Optimizations;
import io.github.bucket4j.redis.lettuce.Bucket4jLettuce;
import io.lettuce.core.RedisClient;
import io.lettuce.core.codec.ByteArrayCodec;
import io.lettuce.core.codec.RedisCodec;
import io.lettuce.core.codec.StringCodec;
import java.time.Duration;
import java.util.concurrent.ConcurrentHashMap;

/** bucket4j over Lettuce, by compare-and-swap. Callers of one key share a round trip. */
final class Bucket4j implements Subject {
    private final AsyncProxyManager<String> manager;

    Bucket4j(String url) {
        var codec = RedisCodec.of(StringCodec.UTF8, ByteArrayCodec.INSTANCE);
        var refill = Duration.ofSeconds(10);
        manager =
                Bucket4jLettuce.casBasedBuilder(RedisClient.create(url).connect(codec))
                        .expirationAfterWrite(
                                ExpirationAfterWriteStrategy.basedOnTimeForRefillingBucketUpToMax(
                                        refill))
                        .build()
                        .asAsync();
    }

    @Override
    public Limiter limiter(String name, long limit) {
        var day = Duration.ofDays(1);
        var configuration =
                BucketConfiguration.builder()
                        .addLimit(
                                bandwidth -> bandwidth.capacity(limit).refillGreedy(limit, day))
                        .build();
        var buckets = new ConcurrentHashMap<String, AsyncBucketProxy>();
        return key ->
                buckets.computeIfAbsent(
                                key,
                                absent ->
                                        manager.builder()
                                                .withOptimization(Optimizations.batching())
                                                .build(name + ":" + key, configuration))
                        .tryConsume(1);
    }
}

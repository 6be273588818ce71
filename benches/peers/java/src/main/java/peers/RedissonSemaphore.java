package peers;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RedissonClient;

/**
 * RPermitExpirableSemaphore of Redisson: a request takes a permit with a lease of an hour, and
 * returns it. Each key has a semaphore of its own.
 */
final class RedissonSemaphore implements Subject {
    private final RedissonClient client;

    RedissonSemaphore(String url) {
        client = RedissonLimiter.connect(url);
    }

    @Override
    public Limiter limiter(String name, long limit) {
        var semaphores =
                new ConcurrentHashMap<String, CompletableFuture<RPermitExpirableSemaphore>>();
        return key ->
                semaphores
                        .computeIfAbsent(key, absent -> create(name + ":" + key, (int) limit))
                        .thenCompose(RedissonSemaphore::takeAndReturn);
    }

    private CompletableFuture<RPermitExpirableSemaphore> create(String key, int limit) {
        var semaphore = client.getPermitExpirableSemaphore(key);
        return semaphore.trySetPermitsAsync(limit).toCompletableFuture().thenApply(set -> semaphore);
    }

    private static CompletableFuture<Boolean> takeAndReturn(RPermitExpirableSemaphore semaphore) {
        return semaphore
                .tryAcquireAsync(0, 3_600, TimeUnit.SECONDS)
                .toCompletableFuture()
                .thenCompose(
                        permit ->
                                permit == null
                                        ? CompletableFuture.completedFuture(false)
                                        : semaphore
                                                .releaseAsync(permit)
                                                .toCompletableFuture()
                                                .thenApply(done -> true));
    }
}

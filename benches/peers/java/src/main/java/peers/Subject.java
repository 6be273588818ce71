package peers;

import java.util.concurrent.CompletableFuture;

/** A rate limiter that is measured. */
interface Subject {
    /** A limiter of so many requests per day, which may come at once. */
    Limiter limiter(String name, long limit);

    /** The limiter of one quota. */
    interface Limiter {
        /** Charges a request to a key. The future tells whether the request was admitted. */
        CompletableFuture<Boolean> check(String key);
    }
}

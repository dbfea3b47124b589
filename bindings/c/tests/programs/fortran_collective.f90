! Collective operations between arrays of Fortran: the program starts itself as the other rank.
program test
    use, intrinsic :: iso_c_binding
    use, intrinsic :: iso_fortran_env, only: int32, int64, real32, real64
    use fabricast
    use fabricast_collective
    implicit none

    integer(c_int64_t), parameter :: LONG = 60000000000_c_int64_t
    integer(c_int32_t), parameter :: SUM_UP = FABRICAST_REDUCE_SUM
    type(fabricast_domain) :: domain, none
    integer(c_int32_t) :: rank, ranks

    call join()
    call reductions()
    call moves()
    call unequal()
    call errors()
    call done(fabricast_domain_close(domain, LONG))
    if (fabricast_open_handles() /= 0) error stop 'handles are open'
    if (rank == 0) print '(a)', 'fortran_collective: ok'

contains

    subroutine join()
        character(1000) :: command, argument

        call get_command_argument(0, command)
        call get_command_argument(1, argument)
        if (argument == '') then
            call execute_command_line(trim(command)//' other', wait=.false.)
        end if
        call done(fabricast_domain_join(2, merge(0, 1, argument == ''), domain, job='fortran', &
                                        timeout=LONG, algorithm=FABRICAST_ALGORITHM_AUTOMATIC))
        call done(fabricast_domain_rank(domain, rank))
        call done(fabricast_domain_size(domain, ranks))
        call check(ranks == 2, 'ranks')
        call done(fabricast_domain_barrier(domain, LONG))
    end subroutine

    subroutine done(status)
        integer(c_int32_t), intent(in) :: status
        if (status /= FABRICAST_OK) then
            print '(a)', fabricast_message()
            error stop 1
        end if
    end subroutine

    subroutine expect(expected, status)
        integer(c_int32_t), intent(in) :: expected, status
        if (status /= expected) then
            print '(4a)', fabricast_status_name(status), ', not ', &
                fabricast_status_name(expected), ': '//fabricast_message()
            error stop 2
        end if
    end subroutine

    subroutine check(is_right, what)
        logical, intent(in) :: is_right
        character(*), intent(in) :: what
        if (.not. is_right) then
            print '(2a)', 'failed: ', what
            error stop 3
        end if
    end subroutine

    subroutine reductions()
        real(real32) :: single(3)
        real(real64) :: double(2, 3), strided(6), blocks(3, 2), own(3)
        integer(int32) :: number
        integer(int64) :: large(2)

        single = [1.0, 2.0, real(rank)]
        call done(fabricast_domain_all_reduce(domain, single, SUM_UP, LONG))
        call check(all(single == [2.0, 4.0, 1.0]), 'all-reduce of real32')
        double = rank
        call done(fabricast_domain_all_reduce(domain, double, FABRICAST_REDUCE_MEAN, LONG))
        call check(all(double == 0.5), 'all-reduce of a matrix')
        strided = 1
        call done(fabricast_domain_all_reduce(domain, strided(::2), SUM_UP, LONG))
        call check(all(strided == [2, 1, 2, 1, 2, 1]), 'all-reduce of a section')
        number = rank + 3
        call done(fabricast_domain_all_reduce(domain, number, FABRICAST_REDUCE_PRODUCT, LONG))
        call check(number == 12, 'all-reduce of a scalar')
        large = [rank, -rank]
        call done(fabricast_domain_reduce(domain, large, FABRICAST_REDUCE_MIN, 1, LONG))
        call check(all(large == [0, -rank]), 'reduce')
        blocks(:, 1) = rank
        blocks(:, 2) = 10 + rank
        call done(fabricast_domain_reduce_scatter(domain, blocks, own, SUM_UP, LONG))
        call check(all(own == 1 + 20 * rank), 'reduce-scatter')
    end subroutine

    subroutine moves()
        integer(int64) :: own(2), all_of(2, 2), received(2, 2)
        real(real32) :: none_of(0), block(2)

        own = [10 * rank, 10 * rank + 1]
        call done(fabricast_domain_all_gather(domain, own, all_of, LONG))
        call check(all(all_of == reshape([0, 1, 10, 11], [2, 2])), 'all-gather')
        all_of = rank
        all_of(:, 2) = rank + 5
        call done(fabricast_domain_all_to_all(domain, all_of, received, LONG))
        call check(all(received(:, 1) == 5 * rank) .and. all(received(:, 2) == 1 + 5 * rank), &
                   'all-to-all')
        received = -1
        call done(fabricast_domain_gather(domain, own, received, 1, LONG))
        call check(merge(all(received(:, 2) == own), all(received == -1), rank == 1), 'gather')
        if (rank == 0) then
            call done(fabricast_domain_scatter(domain, [1.0, 2.0, 3.0, 4.0], block, 0, LONG))
        else
            call done(fabricast_domain_scatter(domain, none_of, block, 0, LONG))
        end if
        call check(all(block == [1.0, 2.0] + 2 * rank), 'scatter')
        call done(fabricast_domain_broadcast(domain, block, 1, LONG))
        call check(all(block == [3.0, 4.0]), 'broadcast')
    end subroutine

    subroutine unequal()
        integer(c_size_t), parameter :: counts(2) = [1_c_size_t, 3_c_size_t]
        integer(c_size_t) :: given(2)
        integer(int32) :: own(counts(rank + 1)), all_of(4), taken(2 * counts(rank + 1))

        own = rank + 1
        call done(fabricast_domain_all_gather(domain, own, all_of, LONG, counts))
        call check(all(all_of == [1, 2, 2, 2]), 'all-gather of unequal blocks')
        call done(fabricast_domain_reduce_scatter(domain, all_of, own, SUM_UP, LONG, counts))
        call check(all(own == 2 * (rank + 1)), 'reduce-scatter of unequal blocks')
        given = counts(rank + 1)
        call done(fabricast_domain_all_to_all(domain, all_of, taken, LONG, counts, given))
        call check(all(taken == rank + 1), 'all-to-all of unequal blocks')
        call done(fabricast_domain_gather(domain, own, all_of, 0, LONG, counts))
        call check(rank == 1 .or. all(all_of == [2, 4, 4, 4]), 'gather of unequal blocks')
        call done(fabricast_domain_scatter(domain, all_of, own, 0, LONG, counts))
        call check(all(own == 2 * (rank + 1)), 'scatter of unequal blocks')
    end subroutine

    subroutine errors()
        real(real64) :: own(2), all_of(3)

        call expect(FABRICAST_E_BAD_HANDLE, fabricast_domain_all_reduce(none, own, SUM_UP, LONG))
        call expect(FABRICAST_E_BAD_HANDLE, fabricast_domain_all_gather(none, own, all_of, LONG))
        ! The domain goes on after each of these.
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_domain_all_gather(domain, own, all_of, LONG))
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_domain_all_gather(domain, own, all_of, LONG, [2_c_size_t, 2_c_size_t]))
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_domain_reduce_scatter(domain, all_of, own, SUM_UP, LONG))
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_domain_all_to_all(domain, own, all_of, LONG))
        call expect(FABRICAST_E_INVALID_ARGUMENT, &
                    fabricast_domain_broadcast(domain, own, 2, LONG))
        call check(size(fabricast_error_ranks()) == 0, 'no ranks')
        call done(fabricast_domain_barrier(domain, LONG))
    end subroutine
end program
